// Few output tiles, long K: C[M,N] = A[M,K] * B by wgmma, K split over CTAs that need no cluster. FP16 in and out, FP32 sums, sm_90a.
// K % 8 == 0, N % 8 == 0.
//
// The gridDim.z CTAs of a tile take K in runs of BK-steps, as even as can be. One thread keeps a ring of stages full by TMA, the
// first of them before the CTA's barrier; full[s] says that a stage is there, empty[s] that its warps have read it. A warpgroup
// has 64 rows of the tile, and its sums lie in chunks of 8 columns, four floats a thread. Each split owns a run of chunks, at
// least one. It keeps its own part of them in shared memory, and sends the others theirs through the workspace: [tile][chunk]
// [sender][thread]. A thread receives what the thread of its number sent, so that no barrier of the CTA is needed: a warp counts
// its senders, [tile][warp][owner], released by their fence, and the one warp that waits for a counter puts it back. It adds its
// own part and the others' in the order of the splits: the result does not depend on timing. All CTAs must be on the GPU at
// once (a cooperative launch).
// Tails: TMA fills what is outside with zeros, and stores are guarded.
#pragma nv_diag_suppress 177  // the headers have more than this kernel uses
#include "ptx.cuh"
#include "wgmma_atoms.cuh"

using fp16 = unsigned short;

// ---- what the knobs imply; the launch constants in family.yaml repeat THREADS, STAGES and SMEM_BYTES ----
constexpr u32 CONSUMERS = BM * 2, WARPS = CONSUMERS / 32, THREADS = CONSUMERS + 32;  // CONSUMERS: threads
constexpr u32 A_BYTES = BM * BK * 2, STAGE_BYTES = A_BYTES + BN * BK * 2;
constexpr u32 FIT = (232448 - 256) / STAGE_BYTES, STAGES = FIT < 8 ? FIT : 8, BARRIER_OFFSET = STAGES * STAGE_BYTES;
constexpr u32 SMEM_BYTES = BARRIER_OFFSET + 2 * STAGES * 8;
constexpr u32 CHUNKS = BN / 8;     // of a tile, and of a warpgroup's rows
constexpr u32 START = 0xffffffff;  // of the counters
static_assert(SMEM_BYTES <= 232448 && STAGES >= 3 && BM * BN * 2 <= BARRIER_OFFSET, "shared memory of a block");
static_assert(BN % (B_NK ? 16 : 64) == 0 && BM % 64 == 0 && BK % 64 == 0, "knobs do not match");

struct Barriers {
  u32 full, empty;
};

// This CTA's steps along K: `count` of them from `first` on.
struct Steps {
  u32 first, count;
};

// ---- TMA ----
DEVICE void load_stage(const TensorMap* map_a, const TensorMap* map_b, u32 a, u32 full, u32 m0, u32 n0, u32 k) {
  const u32 b = a + A_BYTES;
  mbar_expect(full, STAGE_BYTES);
#pragma unroll
  for (u32 j = 0; j < BK / 64; j++) tma_load(a + j * BM * 128, map_a, k + j * 64, m0, full);
  if constexpr (B_NK) {
#pragma unroll
    for (u32 j = 0; j < BK / 64; j++) tma_load(b + j * BN * 128, map_b, k + j * 64, n0, full);
  } else {  // blocks of 64 columns, each BK rows of K
#pragma unroll
    for (u32 j = 0; j < BN / 64; j++) tma_load(b + j * BK * 128, map_b, n0 + j * 64, k, full);
  }
}

// Steps [from, to) of this CTA; those after the first STAGES wait for their stage.
DEVICE void load(const TensorMap* map_a, const TensorMap* map_b, u32 ring, const Barriers& bar, u32 m0, u32 n0, const Steps& steps, u32 from, u32 to) {
  u32 stage = 0, parity = 0;  // `from` is 0 or STAGES: a wait begins with the first round of reading
#pragma unroll 1
  for (u32 i = from; i < to; i++) {
    if (i >= STAGES) mbar_wait(bar.empty + 8 * stage, parity);
    load_stage(map_a, map_b, ring + stage * STAGE_BYTES, bar.full + 8 * stage, m0, n0, (steps.first + i) * BK);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// ---- wgmma ----
DEVICE void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }  // x is not read before this point

// acc += this warpgroup's 64 rows of A times B, over `count` steps.
DEVICE void multiply(float (&acc)[BN / 2], u32 ring, const Barriers& bar, u32 count, u32 wg, u32 lane) {
  const u64 desc_a = matrix_desc(ring + wg * 8192, 16, 1024);
  const u64 desc_b = matrix_desc(ring + A_BYTES, B_NK ? 16 : BK * 128, 1024);
  u32 stage = 0, parity = 0, last = 0;
#pragma unroll 1
  for (u32 i = 0; i < count; i++) {
    mbar_wait(bar.full + 8 * stage, parity);
    const u64 a = desc_a + stage * (STAGE_BYTES >> 4), b = desc_b + stage * (STAGE_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < BK / 16; k++) {  // in units of 16 bytes: 16 along K are 32 bytes of a row, or 16 rows of 128 bytes
      const u32 to_a = k / 4 * (BM * 8) + k % 4 * 2, to_b = B_NK ? k / 4 * (BN * 8) + k % 4 * 2 : k * 128;
      Wgmma<BN>::template mma<!B_NK>(acc, a + to_a, b + to_b, 1);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the step before this one is done
    if (i > 0 && lane == 0) mbar_arrive(bar.empty + 8 * last);
    last = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>();
#pragma unroll
  for (u32 i = 0; i < BN / 2; i++) pin(acc[i]);
}

// ---- the exchange ----
DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
DEVICE float4 load_part(const float4* p) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
// To shared memory or to the workspace, without a branch.
DEVICE void store_part(bool keep, u32 own, float4* p, float4 v) {
  asm volatile(
      "{.reg .pred keep;\n"
      "setp.ne.b32 keep, %0, 0;\n"
      "@keep st.shared.v4.f32 [%1], {%3, %4, %5, %6};\n"
      "@!keep st.relaxed.gpu.global.v4.f32 [%2], {%3, %4, %5, %6};}" ::"r"(u32(keep)),
      "r"(own), "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}
DEVICE void count_up(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
DEVICE u32 load_counter(const u32* counter) {
  u32 n;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(counter) : "memory");
  return n;
}

// This CTA's number among the `others` + 1 splits of its tile, and the chunks of the tile that it owns.
struct Share {
  u32 mine, others, first, end;

  __device__ __forceinline__ Share(u32 mine, u32 splits)
      : mine(mine), others(splits - 1), first((mine * CHUNKS + others) / splits), end(((mine + 1) * CHUNKS + others) / splits) {}
};

// Where the thread stores its two rows of a chunk.
struct Output {
  fp16 *upper, *lower;  // in chunk 0; the rows row and row + 8 of a warp's 16
  bool has_upper, has_lower;
  u32 chunks;  // of the tile, inside the matrix

  __device__ __forceinline__ void store(u32 chunk, float4 v) const {
    if (has_upper && chunk < chunks) *reinterpret_cast<u32*>(upper + chunk * 8) = pack_half2(v.x, v.y);
    if (has_lower && chunk < chunks) *reinterpret_cast<u32*>(lower + chunk * 8) = pack_half2(v.z, v.w);
  }
};

// Sends the others their chunks, and keeps ours in shared memory, where the thread has 16 bytes at `own` in steps of CONSUMERS.
// A chunk has room for every split but its owner: the later ones move up.
DEVICE void send(const float (&acc)[BN / 2], u32 own, float4* parts, u32* counters, const Share& s, u32 warp, u32 lane) {
  const u32 stride = s.others * (CONSUMERS * 16), later = s.mine * (CONSUMERS * 16), sooner = later - CONSUMERS * 16;  // bytes
#pragma unroll
  for (u32 c = 0; c < CHUNKS; c++) {
    const float4 v = make_float4(acc[c * 4], acc[c * 4 + 1], acc[c * 4 + 2], acc[c * 4 + 3]);
    // Its owner comes before us, or is us, or comes after us, and leaves no room for itself.
    const u32 to = c * stride + (c < s.first ? sooner : later);
    store_part(c >= s.first && c < s.end, own + (c - s.first) * (CONSUMERS * 16), reinterpret_cast<float4*>(reinterpret_cast<unsigned char*>(parts) + to), v);
  }
  __syncwarp();
  if (lane <= s.others && lane != s.mine) count_up(counters + warp * (s.others + 1) + lane);
}

// Adds the others' parts of our chunks to our own, and stores the sums; up to SENDERS parts of AT_ONCE chunks are under way.
template <u32 SENDERS, u32 AT_ONCE>
DEVICE void add_and_store(const float4* own, const float4* parts, const Share& s, const Output& out) {
#pragma unroll 1
  for (u32 chunk = s.first; chunk < s.end; chunk += AT_ONCE) {
    float4 sum[AT_ONCE];
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++)
      if (chunk + j < s.end) sum[j] = own[j * CONSUMERS];
#pragma unroll 1
    for (u32 sender = 0; sender < s.others; sender += SENDERS) {
      float4 v[AT_ONCE][SENDERS];
      const float4* const from = parts + (chunk * s.others + sender) * CONSUMERS;
#pragma unroll
      for (u32 j = 0; j < AT_ONCE; j++)
#pragma unroll
        for (u32 i = 0; i < SENDERS; i++)
          if (chunk + j < s.end && sender + i < s.others) v[j][i] = load_part(from + (j * s.others + i) * CONSUMERS);
#pragma unroll
      for (u32 j = 0; j < AT_ONCE; j++)
#pragma unroll
        for (u32 i = 0; i < SENDERS; i++)
          if (chunk + j < s.end && sender + i < s.others) sum[j].x += v[j][i].x, sum[j].y += v[j][i].y, sum[j].z += v[j][i].z, sum[j].w += v[j][i].w;
    }
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++)
      if (chunk + j < s.end) out.store(chunk + j, sum[j]);
    own += AT_ONCE * CONSUMERS;
  }
}

DEVICE void receive(const float4* own, const float4* parts, u32* counters, const Share& s, const Output& out, u32 warp, u32 lane) {
  u32* const counter = counters + warp * (s.others + 1) + s.mine;
  if (lane == 0) {
    while (load_counter(counter) != START + s.others) {}
    *counter = START;
  }
  __syncwarp();
  if (s.others == 1) add_and_store<1, 8>(own, parts, s, out);
  else if (s.others <= 3) add_and_store<3, 4>(own, parts, s, out);
  else if (s.others <= 7) add_and_store<7, 2>(own, parts, s, out);
  else add_and_store<15, 1>(own, parts, s, out);
}

// steps, more: steps of a split, and splits that take one more.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wgmma_splitk(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, fp16* C, unsigned char* workspace, u32 M, u32 N, u32 steps,
                 u32 more, u32 state_bytes) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, ring = smem_addr(shared);
  const u32 m0 = (RASTER_BLOCK ? blockIdx.y : blockIdx.x) * BM, n0 = (RASTER_BLOCK ? blockIdx.x : blockIdx.y) * BN;
  const u32 split = blockIdx.z, splits = gridDim.z;
  const Steps mine{split * steps + min(split, more), steps + (split < more)};
  const Barriers bar{ring + BARRIER_OFFSET, ring + BARRIER_OFFSET + 8 * STAGES};

  if (threadIdx.x == CONSUMERS) {
    prefetch_map(&map_a);
    prefetch_map(&map_b);
#pragma unroll
    for (u32 s = 0; s < STAGES; s++) mbar_init(bar.full + 8 * s, 1);
    fence_mbar_init();
    load(&map_a, &map_b, ring, bar, m0, n0, mine, 0, min(mine.count, STAGES));
  }
  if (threadIdx.x == 0) {
#pragma unroll
    for (u32 s = 0; s < STAGES; s++) mbar_init(bar.empty + 8 * s, WARPS);
  }
  __syncwarp();
  __syncthreads();  // all roles meet it at the same place in the code
  if (warp == WARPS) {
    if (lane == 0) load(&map_a, &map_b, ring, bar, m0, n0, mine, STAGES, mine.count);
    return;
  }

  float acc[BN / 2] = {};
  multiply(acc, ring, bar, mine.count, warp / 4, lane);
  consumers_sync();  // the ring is free
  const u32 tile = blockIdx.y * gridDim.x + blockIdx.x, m = m0 + warp * 16 + lane / 4;
  u32* const counters = reinterpret_cast<u32*>(workspace) + tile * WARPS * splits;
  float4* const parts = reinterpret_cast<float4*>(workspace + state_bytes) + size_t(tile) * CHUNKS * (splits - 1) * CONSUMERS + threadIdx.x;
  fp16* const c = C + size_t(m) * N + n0 + lane % 4 * 2;
  const Share share(split, splits);
  send(acc, ring + threadIdx.x * 16, parts, counters, share, warp, lane);
  receive(reinterpret_cast<const float4*>(shared) + threadIdx.x, parts, counters, share, Output{c, c + size_t(8) * N, m < M, m + 8 < M, (N - n0) / 8}, warp, lane);
}
