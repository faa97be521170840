// Thin wrappers over the PTX of a TMA + wgmma pipeline: mbarrier, TMA, wgmma control, stmatrix, cluster, setmaxnreg.
// Shared-memory addresses are 32-bit offsets in the shared window. No header is needed.
#pragma once
using u32 = unsigned;
using u64 = unsigned long long;
struct alignas(64) TensorMap {  // the bytes of a CUtensorMap; pass as `const __grid_constant__ TensorMap`
  char opaque[128];
};

#define DEVICE static __device__ __forceinline__

DEVICE u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- mbarrier ----
DEVICE void mbar_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the async proxy and, before a cluster barrier, to the other CTAs.
DEVICE void fence_mbar_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbar_expect(u32 bar, u32 bytes) {  // one arrival; the phase also waits for `bytes` of TMA data
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void mbar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Default (CTA) scope on purpose: a cluster-scope release becomes a MEMBAR.ALL.GPU in every step of the main loop.
DEVICE void mbar_arrive_remote(u32 bar, u32 cta) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(bar),
      "r"(cta)
      : "memory");
}
DEVICE void mbar_wait(u32 bar, u32 parity) {  // until the phase of this parity is over
  asm volatile(
      "{.reg .pred over;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@over bra DONE;\n"
      "bra WAIT;\n"
      "DONE:}" ::"r"(bar), "r"(parity)
      : "memory");
}

// ---- TMA, two-dimensional boxes; x is the contiguous coordinate ----
DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
DEVICE void tma_load(u32 dst, const TensorMap* map, int x, int y, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(bar)
      : "memory");
}
// To the same offset in every CTA of `mask`, whose barrier at the same offset counts the bytes.
DEVICE void tma_load_multicast(u32 dst, const TensorMap* map, int x, int y, u32 bar, u32 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(bar), "h"((unsigned short)mask)
      : "memory");
}
DEVICE void tma_store(const TensorMap* map, u32 src, int x, int y, u64 l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(map), "r"(src),
      "r"(x), "r"(y), "l"(l2_policy)
      : "memory");
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void tma_store_wait_read() {  // until all but the newest PENDING groups of this thread have read their source
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE u64 l2_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE u64 l2_evict_normal() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ---- wgmma control ----
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Shared-memory matrix descriptor, 128-byte swizzle. Offsets between 8-row groups along the strided direction
// (`stride_bytes`) and, for an operand whose contiguous direction is not K, between 64-column blocks (`lead_bytes`).
DEVICE u64 matrix_desc(u32 addr, u32 lead_bytes, u32 stride_bytes) {
  return (u64)((addr & 0x3FFFF) >> 4) | (u64)(lead_bytes >> 4) << 16 | (u64)(stride_bytes >> 4) << 32 | 1ull << 62;
}

// ---- epilogue ----
DEVICE u32 pack_half2(float lo, float hi) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  return packed;
}
DEVICE void stmatrix4(u32 addr, u32 a, u32 b, u32 c, u32 d) {  // four 8x8 matrices; lane l gives the address of row l
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// ---- cluster and registers ----
DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE void cluster_sync() {  // relaxed: what must be seen was released by fence_mbar_init
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <int REGISTERS>
DEVICE void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
