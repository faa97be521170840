// One output tile per CTA by wgmma, for small and medium shapes and for few tiles with long K: C[M,N] = A[M,K] * B, FP16 in and
// out, FP32 accumulation, sm_90a. K % 8 == 0, N % 8 == 0.
//
// Nothing is persistent: the first STAGES loads of a CTA are in flight at once, and it leaves with its tile. K is cut into steps
// of BK, dealt out in turn to the CLUSTER_K CTAs of a cluster (grid z), whose ring of stages TMA (LOADER 1: one thread) or
// cp.async (LOADER 0: four warps, the first stage on its way before the barriers are up) keeps full. The steps of a CTA go in
// turn to SLICES groups of BM / 64 warpgroups, each warpgroup with 64 rows of the tile. full[s] says that a stage is there,
// empty[s] that the warps of its group have read it. If several slices or CTAs have a part of K, each owns a range of columns:
// all send it their partial sums (st.async, counted by an mbarrier, if there is a cluster), and it adds them first slice to last,
// so that the result does not depend on timing. A slice without any steps sends zeros. Tails: the loads fill K with zeros; rows
// and columns outside the matrices are zeros (TMA) or repeat the last ones (cp.async), and are not stored. Rows that are not there
// cost more than rows that are, up to twice the time by TMA and more by cp.async: with RAGGED none is fetched. Boxes of A, and copies,
// have no more rows than A; if it has more than a tile, the last tile begins BM rows before the end, and what it shares with the
// one before comes out of both alike, bit for bit.
#pragma nv_diag_suppress 177  // the headers have more than this kernel uses
#include "ptx.cuh"
#include "slice_sum.cuh"
#include "wgmma_atoms.cuh"

#define WGMMA_D2 WGMMA_D(0), WGMMA_D(1)
#define WGMMA_R2 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
WGMMA_ATOM(32, WGMMA_R2, WGMMA_D2, 16, 17, 18, 19)

// ---- what the knobs imply; the launch constants in family.yaml repeat THREADS and SMEM_BYTES ----
constexpr u32 WG_ROWS = BM / 64, WARPGROUPS = WG_ROWS * SLICES, CONSUMERS = WARPGROUPS * 128;  // CONSUMERS: threads
constexpr u32 THREADS = CONSUMERS + (LOADER ? 32 : 128);
constexpr u32 PARTS = SLICES * CLUSTER_K;                          // partial tiles of an output tile
constexpr u32 CHUNKS = BN / 8, OWNED = CHUNKS / PARTS;             // 8-column chunks of a tile, and those that a slice owns
constexpr u32 A_BYTES = BM * BK * 2, STAGE_BYTES = A_BYTES + BN * BK * 2, RING_BYTES = STAGES * STAGE_BYTES;
// After the ring, what the other slices send, or, if there are none, the tile on its way to C.
constexpr u32 INBOX_BYTES = SLICES * BM * BN * 4 + 16, OUT_BYTES = PARTS > 1 ? INBOX_BYTES : BM * BN * 2;
constexpr u32 BARRIER_OFFSET = RING_BYTES + OUT_BYTES, SMEM_BYTES = BARRIER_OFFSET + 2 * STAGES * 8;
DEVICE u32 box_rows(u32 M) { return RAGGED ? min(u32(BM), M) : BM; }
DEVICE u32 first_row(u32 tile, u32 M) { return RAGGED ? min(tile * BM, M - box_rows(M)) : tile * BM; }
using PartialTiles = Inbox<SLICES * BM, BN>;  // [warpgroup][sender][chunk][thread of the warpgroup][4]
constexpr u32 CHUNK_BYTES = 128 * 16;         // a chunk of a warpgroup's 64 rows, four floats a thread
static_assert(SMEM_BYTES <= 232448 && sizeof(PartialTiles) == INBOX_BYTES, "shared memory of a block");
static_assert(STAGES > SLICES && STAGES <= 32, "a slice gives a stage back when it begins its next one; a lane per stage");
static_assert(OWNED * PARTS == CHUNKS && BN % (B_NK ? 16 : 64) == 0 && (LOADER || BK == 64), "knobs do not match");

struct Barriers {
  u32 full, empty;
};

// This CTA's steps along K: `count` of them, the i-th at `first` + i * STRIDE.
struct Steps {
  static constexpr u32 STRIDE = BK * CLUSTER_K;
  u32 first, count;
};

// ---- TMA ----
DEVICE void load_by_tma(const TensorMap* map_a, const TensorMap* map_b, u32 ring, const Barriers& bar, u32 m0, u32 n0, u32 M, const Steps& steps) {
  const u32 arriving = (box_rows(M) + BN) * BK * 2;  // bytes of a stage
  u32 stage = 0, parity = 1;
#pragma unroll 1
  for (u32 i = 0, k = steps.first; i < steps.count; i++, k += Steps::STRIDE) {
    const u32 full = bar.full + 8 * stage, a = ring + stage * STAGE_BYTES, b = a + A_BYTES;
    if (i >= STAGES) mbar_wait(bar.empty + 8 * stage, parity);
    mbar_expect(full, arriving);
#pragma unroll
    for (u32 j = 0; j < BK / 64; j++) tma_load(a + j * BM * 128, map_a, k + j * 64, m0, full);
    if constexpr (B_NK) {
#pragma unroll
      for (u32 j = 0; j < BK / 64; j++) tma_load(b + j * BN * 128, map_b, k + j * 64, n0, full);
    } else {  // blocks of 64 columns, each BK rows of K
#pragma unroll
      for (int j = 0; j < BN / 64; j++) tma_load(b + j * BK * 128, map_b, n0 + j * 64, k, full);
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// ---- cp.async ----
// Arrives on the barrier when all copies that this thread has started are done; counted as one of the expected arrivals.
DEVICE void arrive_when_copied(u32 bar) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory"); }
DEVICE void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same pointer, which the compiler keeps in registers rather than computing it again for every copy.
DEVICE const fp16* opaque(const fp16* p) {
  asm("" : "+l"(p));
  return p;
}

// One of 128 threads' share of copying stages: 16-byte chunk `thread % 8` of 128-byte rows `thread / 8` + 16 i, in the layout of
// the 128-byte swizzle. All addresses are inside the operands; k past the edge are zeros on both sides.
struct Copier {
  const fp16 *a[BM / 16], *b[B_NK ? BN / 16 : BN / 64];  // rows of A and of B (N x K) at k = 0; columns of B (K x N)
  u32 N, K, row, column, to, copies_a;  // copies_a: so many of our rows of A are there

  __device__ __forceinline__ Copier(const fp16* A, const fp16* B, u32 m0, u32 n0, u32 M, u32 N, u32 K, u32 thread)
      : N(N), K(K), row(thread / 8), column(thread % 8 * 8), to(row * 128 + (thread % 8 ^ row % 8) * 16),
        copies_a((box_rows(M) + 15 - row) / 16) {
#pragma unroll
    for (u32 i = 0; i < BM / 16; i++) a[i] = opaque(A + size_t(min(m0 + row + i * 16, M - 1)) * K);
    if constexpr (B_NK) {
#pragma unroll
      for (u32 i = 0; i < BN / 16; i++) b[i] = opaque(B + size_t(min(n0 + row + i * 16, N - 1)) * K);
    } else {
#pragma unroll
      for (int j = 0; j < BN / 64; j++) b[j] = opaque(B + min(n0 + column + j * 64, N - 8));
    }
  }

  // Starts copying the step at k0.
  __device__ __forceinline__ void copy(u32 stage, u32 k0) const {
    const bool inside = k0 + column < K;
    const u32 k = inside ? k0 + column : 0;
#pragma unroll
    for (u32 i = 0; i < BM / 16; i++) cp_async_16(stage + to + i * 2048, a[i] + k, inside && (!RAGGED || i < copies_a));
    if constexpr (B_NK) {
#pragma unroll
      for (u32 i = 0; i < BN / 16; i++) cp_async_16(stage + A_BYTES + to + i * 2048, b[i] + k, inside);
    } else {
#pragma unroll
      for (u32 i = 0; i < BK / 16; i++) {
        const u32 kb = k0 + row + i * 16;
        const size_t skip = size_t(min(kb, K - 1)) * N;
#pragma unroll
        for (int j = 0; j < BN / 64; j++) cp_async_16(stage + A_BYTES + to + j * (BK * 128) + i * 2048, b[j] + skip, kb < K);
      }
    }
  }
};

// The steps after the first, whose copy has begun.
DEVICE void load_by_copies(const Copier& copier, u32 ring, const Barriers& bar, const Steps& steps) {
  u32 stage = 0, parity = 1;
#pragma unroll 1
  for (u32 i = 0, k = steps.first; i < steps.count; i++, k += Steps::STRIDE) {
    if (i >= STAGES) mbar_wait(bar.empty + 8 * stage, parity);
    if (i > 0) copier.copy(ring + stage * STAGE_BYTES, k);
    arrive_when_copied(bar.full + 8 * stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  await_copies();
}

// ---- wgmma ----
DEVICE void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }  // x is not read before this point

// acc += this warpgroup's 64 rows of A times B, over the steps of its slice.
DEVICE void multiply(float (&acc)[BN / 2], u32 ring, const Barriers& bar, u32 count, u32 slice, u32 wg_row, u32 lane) {
  const u64 desc_a = matrix_desc(ring + wg_row * 8192, 16, 1024);
  const u64 desc_b = matrix_desc(ring + A_BYTES, B_NK ? 16 : BK * 128, 1024);
  const bool reused = count > STAGES;  // stages are given back only if they are filled again
  u32 stage = slice, parity = 0, last = 0;
  for (u32 i = slice; i < count; i += SLICES) {
    mbar_wait(bar.full + 8 * stage, parity);
    if constexpr (!LOADER) fence_async_proxy();  // wgmma reads what cp.async has written
    const u64 a = desc_a + stage * (STAGE_BYTES >> 4), b = desc_b + stage * (STAGE_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < BK / 16; k++) {  // in units of 16 bytes: 16 along K are 32 bytes of a row, or 16 rows of 128 bytes
      const u32 to_a = k / 4 * (BM * 8) + k % 4 * 2, to_b = B_NK ? k / 4 * (BN * 8) + k % 4 * 2 : k * 128;
      Wgmma<BN>::template mma<!B_NK>(acc, a + to_a, b + to_b, 1);
    }
    wgmma_commit();
    if (reused) {
      wgmma_wait<1>();  // the step before this one is done
      if (i > slice && lane == 0) mbar_arrive(bar.empty + 8 * last);
      last = stage;
    }
    stage += SLICES;
    if (stage >= STAGES) stage -= STAGES, parity ^= 1;
  }
  wgmma_wait<0>();
#pragma unroll
  for (u32 i = 0; i < BN / 2; i++) pin(acc[i]);
}

// ---- from fragments to C ----
// One warp's 16 rows x COUNT chunks of 8 columns at (row, column), in 16-byte stores whose neighbours lie in the same row. They
// pass through the warp's own `scratch`, chunks PITCH bytes apart, rows of a chunk permuted so that no banks conflict.
template <u32 COUNT, u32 PITCH>
DEVICE void store_rows(const float (&d)[COUNT * 4], unsigned char* scratch, const OutputTile& tile, u32 row, u32 column, u32 lane) {
  static_assert(COUNT == 1 || COUNT % 2 == 0, "chunks are stored in pairs");
  constexpr u32 WIDE = COUNT % 8 == 0 ? 8 : COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1, SPREAD = 8 / WIDE;
  if constexpr (COUNT == 1) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) *reinterpret_cast<u32*>(scratch + (lane / 4 + h * 8) * 16 + lane % 4 * 4) = pack_half2(d[h * 2], d[h * 2 + 1]);
  } else {
    const u32 to = smem_addr(scratch) + lane / 16 * PITCH, place = lane % 16 ^ lane / 16 * SPREAD;
#pragma unroll
    for (u32 j = 0; j < COUNT; j += 2)
      stmatrix4(to + j * PITCH + (place ^ j % WIDE * SPREAD) * 16, pack_half2(d[j * 4], d[j * 4 + 1]), pack_half2(d[j * 4 + 2], d[j * 4 + 3]),
                pack_half2(d[j * 4 + 4], d[j * 4 + 5]), pack_half2(d[j * 4 + 6], d[j * 4 + 7]));
  }
  __syncwarp();
#pragma unroll
  for (u32 i = 0; i < COUNT * 16; i += 32) {
    const u32 q = i + lane, r = q / WIDE % 16, chunk = q / (WIDE * 16) * WIDE + q % WIDE;
    if (COUNT == 1 && q >= 16) break;
    const u32 m = tile.row0 + row + r, n = tile.column0 + column + chunk * 8;
    if (m < tile.M && n < tile.N)
      *reinterpret_cast<uint4*>(tile.C + size_t(m) * tile.N + n) = *reinterpret_cast<const uint4*>(scratch + chunk * PITCH + (r ^ chunk % WIDE * SPREAD) * 16);
  }
}

DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Gives every slice of every CTA the columns that it owns, then adds and stores what is ours.
DEVICE void sum_and_store_fragments(const float (&acc)[BN / 2], PartialTiles& inbox, const OutputTile& tile, u32 rank, u32 slice, u32 wg_row, u32 warp, u32 lane) {
  const u32 part = rank * SLICES + slice, thread = warp % 4 * 32 + lane;
  float* const parts = inbox.parts + (part * OWNED * 128 + thread) * 4;  // as sender, in the inbox of row group 0, slice 0
#pragma unroll
  for (u32 owner = 0; owner < PARTS; owner++) {
    float* const to = parts + (owner % SLICES * WG_ROWS + wg_row) * (CHUNKS * 512);
    u32 there = 0, arrived = 0;
    if constexpr (CLUSTER_K > 1) there = in_cta(shared_address(to), owner / SLICES), arrived = in_cta(shared_address(&inbox.arrived), owner / SLICES);
#pragma unroll
    for (u32 j = 0; j < OWNED; j++) {
      const float* d = acc + (owner * OWNED + j) * 4;
      const float4 v = make_float4(d[0], d[1], d[2], d[3]);
      if constexpr (CLUSTER_K > 1) store_async(there + j * CHUNK_BYTES, arrived, v);
      else *reinterpret_cast<float4*>(to + j * 512) = v;
    }
  }
  if constexpr (CLUSTER_K > 1) await_parts(inbox);
  else consumers_sync();

  float* const mine = inbox.parts + (slice * WG_ROWS + wg_row) * (CHUNKS * 512);
  float own[OWNED * 4];
#pragma unroll
  for (u32 j = 0; j < OWNED; j++) {
    float v[4];
    sum<PARTS>(v, mine + (j * 128 + thread) * 4, OWNED * 512);
#pragma unroll
    for (u32 i = 0; i < 4; i++) own[j * 4 + i] = v[i];
  }
  __syncwarp();  // the warp has read what it overwrites: its own 512 bytes of the first sender's chunks
  store_rows<OWNED, CHUNK_BYTES>(own, reinterpret_cast<unsigned char*>(mine + warp % 4 * 128), tile, wg_row * 64 + warp % 4 * 16, part * OWNED * 8, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wgmma_tile(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const fp16* A, const fp16* B, fp16* C, u32 M, u32 N, u32 K) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& inbox = *reinterpret_cast<PartialTiles*>(shared + RING_BYTES);  // only there if PARTS > 1
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, ring = smem_addr(shared);
  const u32 tile_m = RASTER_BLOCK ? blockIdx.y : blockIdx.x, tile_n = RASTER_BLOCK ? blockIdx.z * gridDim.x + blockIdx.x : blockIdx.y;
  const u32 m0 = first_row(tile_m, M), n0 = tile_n * BN, rank = CLUSTER_K > 1 ? blockIdx.z : 0;
  const Barriers bar{ring + BARRIER_OFFSET, ring + BARRIER_OFFSET + 8 * STAGES};
  const Steps steps{rank * BK, ((K + BK - 1) / BK + CLUSTER_K - 1 - rank) / CLUSTER_K};
  const bool loads = warp >= CONSUMERS / 32;

  if (warp < 2 && lane == 0) {  // two warps, because an initialisation takes its time
    const u32 first = warp == 0 ? bar.full : bar.empty, arrivals = warp == 0 ? (LOADER ? 1 : 128) : 4 * WG_ROWS;
#pragma unroll
    for (u32 s = 0; s < STAGES; s++) mbar_init(first + 8 * s, arrivals);
    fence_mbar_init();
  }
  if (LOADER && threadIdx.x == CONSUMERS) {
    prefetch_map(&map_a);
    prefetch_map(&map_b);
  }
  __syncwarp();
  // All roles meet the barriers of the CTA and of the cluster at the same place in the code.
  const Copier copier(A, B, m0, n0, M, N, K, threadIdx.x - CONSUMERS);
  if constexpr (!LOADER)
    if (loads && steps.count > 0) copier.copy(ring, steps.first);
  if constexpr (CLUSTER_K > 1) open_inbox(inbox);
  __syncthreads();
  if constexpr (CLUSTER_K > 1) expect_parts(inbox);

  const u32 wg_row = warp / 4 % WG_ROWS, slice = warp / 4 / WG_ROWS;
  float acc[BN / 2] = {};
  if (loads) {
    if constexpr (!LOADER) load_by_copies(copier, ring, bar, steps);
    else if (lane == 0) load_by_tma(&map_a, &map_b, ring, bar, m0, n0, M, steps);
    __syncwarp();
  } else {
    multiply(acc, ring, bar, steps.count, slice, wg_row, lane);
  }
  if constexpr (CLUSTER_K > 1) await_inboxes();
  if (loads) return;

  const OutputTile tile{C, M, N, m0, n0};
  if constexpr (PARTS > 1) sum_and_store_fragments(acc, inbox, tile, rank, slice, wg_row, warp, lane);
  else store_rows<CHUNKS, 256>(acc, shared + RING_BYTES + warp * (CHUNKS * 256), tile, wg_row * 64 + warp % 4 * 16, 0, lane);
}
