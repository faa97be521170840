// fp16 tensor-core work below the warpgroup: mma.sync, ldmatrix, cp.async, and loads and stores of whole vectors.
// Names and fragment layouts are those of the PTX ISA, "Warp-level matrix instructions". No host headers needed.
#pragma once

typedef unsigned short fp16;  // the bits of one; arithmetic happens in float

__device__ __forceinline__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// ---- mma.sync m16n8k16 -----------------------------------------------------------------------------------------
// With g = lane / 4 and t = lane % 4, a register holds two neighbours along K (a, b) or one entry (d):
//   a: {row g, k 2t}, {row g + 8, k 2t}, {row g, k 2t + 8}, {row g + 8, k 2t + 8}     b: {k 2t, column g}, {k 2t + 8, column g}
//   d: (row g, column 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)

__device__ __forceinline__ void mma_16816(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- shared memory ---------------------------------------------------------------------------------------------

// Byte offset of a 16-byte chunk in a row-major tile of CHUNKS (a power of two) chunks a row. The chunks of a row are permuted
// so that one chunk column of eight consecutive rows lies in eight different 16-byte bank groups: ldmatrix has no conflicts.
// Rows r and r + 8 are permuted alike.
template <unsigned CHUNKS>
__device__ __forceinline__ unsigned swizzled(unsigned row, unsigned chunk) {
  const unsigned mask = CHUNKS >= 8 ? row % 8 : row / (8 / CHUNKS) % CHUNKS;
  return (row * CHUNKS + (chunk ^ mask)) * 16;
}

// Four 8x8 matrices; lane 8 i + r gives the address of row r of matrix i, and register i is that of matrix i.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// 16 bytes from global to shared memory, or 16 zero bytes, when nothing is read.
__device__ __forceinline__ void cp_async_16(unsigned to, const fp16* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- global memory ---------------------------------------------------------------------------------------------

// V halves by one load, two in a word, or zeros, when nothing is read. They are read once, so they displace nothing in L1.
template <int V>
__device__ __forceinline__ void load_or_zero(unsigned (&r)[(V + 1) / 2], const fp16* p, bool valid) {
  static_assert(V == 1 || V == 2 || V == 4 || V == 8, "one load instruction");
  if constexpr (V == 1) {
    fp16 h;
    asm volatile("{\n .reg .pred v;\n setp.ne.b32 v, %2, 0;\n mov.b16 %0, 0;\n @v ld.global.nc.L1::no_allocate.b16 %0, [%1];\n}" : "=&h"(h) : "l"(p), "r"(int(valid)));
    r[0] = h;
  }
  if constexpr (V == 2)
    asm volatile("{\n .reg .pred v;\n setp.ne.b32 v, %2, 0;\n mov.b32 %0, 0;\n @v ld.global.nc.L1::no_allocate.b32 %0, [%1];\n}" : "=&r"(r[0]) : "l"(p), "r"(int(valid)));
  if constexpr (V == 4)
    asm volatile(
        "{\n .reg .pred v;\n setp.ne.b32 v, %3, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n @v ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];\n}"
        : "=&r"(r[0]), "=&r"(r[1])
        : "l"(p), "r"(int(valid)));
  if constexpr (V == 8)
    asm volatile(
        "{\n .reg .pred v;\n setp.ne.b32 v, %5, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
        " @v ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(r[0]), "=&r"(r[1]), "=&r"(r[2]), "=&r"(r[3])
        : "l"(p), "r"(int(valid)));
}

// Two floats as fp16, rounded to nearest; `low` comes first in memory.
__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// V consecutive outputs by one store of 2 V bytes, to which p is aligned.
template <int V>
__device__ __forceinline__ void store_fp16(fp16* p, const float (&v)[V]) {
  static_assert(V == 2 || V == 4 || V == 8, "one store instruction");
  if constexpr (V == 2) *reinterpret_cast<unsigned*>(p) = pack(v[0], v[1]);
  if constexpr (V == 4) *reinterpret_cast<uint2*>(p) = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
  if constexpr (V == 8) *reinterpret_cast<uint4*>(p) = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}
