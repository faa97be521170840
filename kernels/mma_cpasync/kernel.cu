// HGEMM for small and medium shapes: cp.async into a ring of shared-memory stages, ldmatrix, mma.sync.
// C[M,N] = A[M,K] B, fp16 in and out, FP32 accumulation. K % 8 == 0, N % 8 == 0.
//
// A CTA makes a BM x BN tile by SLICES groups of WARPS warps. Every group multiplies the whole tile over its own slices of K, BK
// long and dealt out in turn among the groups of all CLUSTER_K CTAs of the cluster (grid z), through a ring of its own. A group
// is one warp, which never waits for another before the sum at the end, or the whole CTA.
#include "slice_sum.cuh"

constexpr unsigned WARPS_M = WARPS > 1 ? 2 : 1, WARPS_N = WARPS / WARPS_M, WARP_M = BM / WARPS_M, WARP_N = BN / WARPS_N;
constexpr unsigned GROUP = 32 * WARPS, THREADS = GROUP * SLICES, STEP = BK * SLICES * CLUSTER_K;
// 16-byte chunks in a row of the tiles of A (BM x BK) and of B (BN x BK or BK x BN)
constexpr unsigned A_CHUNKS = BK / 8, B_CHUNKS = (B_NK ? BK : BN) / 8;
constexpr unsigned A_BYTES = BM * BK * 2, STAGE_BYTES = A_BYTES + BN * BK * 2, RING_BYTES = STAGES * STAGE_BYTES;
constexpr unsigned PITCH = BN + 8;  // of a partial tile in floats: no bank conflicts when lanes write fragments
static_assert(WARPS == 1 || SLICES == 1, "a group is a warp or the CTA");
static_assert(BM * PITCH * 4 <= RING_BYTES, "a partial tile takes the place of its group's ring");

__device__ __forceinline__ void group_sync() {
  if constexpr (WARPS == 1) __syncwarp();
  else __syncthreads();
}

// The same pointer, which the compiler keeps in registers rather than computing it again for every copy.
__device__ __forceinline__ const fp16* opaque(const fp16* p) {
  asm("" : "+l"(p));
  return p;
}

// One thread's share of copying stages. All addresses are inside the operands: rows and columns past the edge repeat the last
// ones, whose results are not stored; k past the edge are zeros on both sides.
struct Copier {
  // Rows between two chunks of a thread, and chunks of a thread
  static constexpr unsigned A_EVERY = GROUP / A_CHUNKS, A_COUNT = BM / A_EVERY;
  static constexpr unsigned B_EVERY = GROUP / B_CHUNKS, B_COUNT = (B_NK ? BN : BK) / B_EVERY;
  const fp16 *a[A_COUNT], *b[B_NK ? B_COUNT : 1];  // rows of A and of B (N x K) from k = 0; B (K x N) at k = 0
  unsigned N, K, thread;

  __device__ __forceinline__ Copier(const fp16* A, const fp16* B, unsigned m0, unsigned n0, unsigned M, unsigned N, unsigned K, unsigned thread) : N(N), K(K), thread(thread) {
#pragma unroll
    for (unsigned i = 0; i < A_COUNT; i++) a[i] = opaque(A + size_t(min(m0 + thread / A_CHUNKS + i * A_EVERY, M - 1)) * K);
    if constexpr (B_NK) {
#pragma unroll
      for (unsigned i = 0; i < B_COUNT; i++) b[i] = opaque(B + size_t(min(n0 + thread / B_CHUNKS + i * B_EVERY, N - 1)) * K);
    } else {
      b[0] = opaque(B + min(n0 + thread % B_CHUNKS * 8, N - 8));
    }
  }

  // Starts copying the slice that begins at k0.
  __device__ __forceinline__ void copy(unsigned stage, unsigned k0) const {
    const unsigned ka = k0 + thread % A_CHUNKS * 8;
#pragma unroll
    for (unsigned i = 0; i < A_COUNT; i++) cp_async_16(stage + swizzled<A_CHUNKS>(thread / A_CHUNKS + i * A_EVERY, thread % A_CHUNKS), a[i] + min(ka, K - 8), ka < K);
    const unsigned to = stage + A_BYTES;
    if constexpr (B_NK) {
      const unsigned kb = k0 + thread % B_CHUNKS * 8;
#pragma unroll
      for (unsigned i = 0; i < B_COUNT; i++) cp_async_16(to + swizzled<B_CHUNKS>(thread / B_CHUNKS + i * B_EVERY, thread % B_CHUNKS), b[i] + min(kb, K - 8), kb < K);
    } else {
#pragma unroll
      for (unsigned i = 0; i < B_COUNT; i++) {
        const unsigned row = thread / B_CHUNKS + i * B_EVERY, kb = k0 + row;
        cp_async_16(to + swizzled<B_CHUNKS>(row, thread % B_CHUNKS), b[0] + size_t(min(kb, K - 1)) * N, kb < K);
      }
    }
  }
};

// One warp's part of the tile.
struct Accumulator {
  static constexpr unsigned TILES_M = WARP_M / 16, TILES_N = WARP_N / 8;
  float d[TILES_M][TILES_N][4] = {};
  unsigned row, column, lane;  // of the warp's part in the tile

  // Adds the product over a stage. A lane's addresses for other k, or other columns of B (K x N), differ in the chunk number alone,
  // by a power of two, and the swizzle commutes with flipping its bits.
  __device__ __forceinline__ void multiply(unsigned stage) {
    const unsigned a = stage + swizzled<A_CHUNKS>(row + lane % 16, lane / 16);
    const unsigned b = stage + A_BYTES + (B_NK ? swizzled<B_CHUNKS>(column + lane / 16 * 8 + lane % 8, lane / 8 % 2) : swizzled<B_CHUNKS>(lane % 16, column / 8 + lane / 16));
#pragma unroll
    for (unsigned k = 0; k < BK; k += 16) {
      unsigned fa[TILES_M][4], fb[TILES_N / 2][4];
#pragma unroll
      for (unsigned m = 0; m < TILES_M; m++) ldmatrix_x4(fa[m], (a ^ k * 2) + m * 16 * BK * 2);
#pragma unroll
      for (unsigned n = 0; n < TILES_N / 2; n++) {
        if constexpr (B_NK) ldmatrix_x4(fb[n], (b ^ k * 2) + n * 16 * BK * 2);
        else ldmatrix_x4_trans(fb[n], (b ^ n * 32) + k * BN * 2);
      }
#pragma unroll
      for (unsigned m = 0; m < TILES_M; m++)
#pragma unroll
        for (unsigned n = 0; n < TILES_N; n++) mma_16816(d[m][n], fa[m][0], fa[m][1], fa[m][2], fa[m][3], fb[n / 2][n % 2 * 2], fb[n / 2][n % 2 * 2 + 1]);
    }
  }

  __device__ __forceinline__ void write(float* part) const {
    float* const p = part + (row + lane / 4) * PITCH + column + lane % 4 * 2;
#pragma unroll
    for (unsigned m = 0; m < TILES_M; m++)
#pragma unroll
      for (unsigned n = 0; n < TILES_N; n++)
#pragma unroll
        for (unsigned h = 0; h < 2; h++) *reinterpret_cast<float2*>(p + (m * 16 + h * 8) * PITCH + n * 8) = make_float2(d[m][n][h * 2], d[m][n][h * 2 + 1]);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) mma_cpasync(const fp16* A, const fp16* B, fp16* C, unsigned M, unsigned N, unsigned K) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* const inbox = reinterpret_cast<Inbox<BM, BN>*>(shared + SLICES * RING_BYTES);  // only there if CLUSTER_K > 1
  const unsigned warp = threadIdx.x / 32, slice = threadIdx.x / GROUP, rank = CLUSTER_K > 1 ? blockIdx.z : 0;
  const unsigned tile_m = RASTER_BLOCK ? blockIdx.y : blockIdx.x, tile_n = RASTER_BLOCK ? blockIdx.z * gridDim.x + blockIdx.x : blockIdx.y;
  const unsigned m0 = tile_m * BM, n0 = tile_n * BN, first = (rank * SLICES + slice) * BK;
  const unsigned ring = shared_address(shared) + slice * RING_BYTES, ring_end = ring + RING_BYTES;

  const Copier copier(A, B, m0, n0, M, N, K, threadIdx.x % GROUP);
  unsigned filling = ring, k_filling = first;
  auto fill = [&] {  // the next stage, if there is K left; one commit group in any case
    if (k_filling < K) copier.copy(filling, k_filling);
    cp_async_commit();
    k_filling += STEP;
    filling = filling + STAGE_BYTES == ring_end ? ring : filling + STAGE_BYTES;
  };
#pragma unroll 1
  for (unsigned s = 0; s < STAGES - 1; s++) fill();
  if constexpr (CLUSTER_K > 1) open_inbox(*inbox);

  Accumulator acc{};
  acc.row = warp % WARPS / WARPS_N * WARP_M, acc.column = warp % WARPS_N * WARP_N, acc.lane = threadIdx.x % 32;
  unsigned stage = ring;
#pragma unroll 1
  for (unsigned k = first; k < K; k += STEP) {
    cp_async_wait<STAGES - 2>();
    group_sync();  // the stage is complete, and the one before it has been read
    fill();
    acc.multiply(stage);
    stage = stage + STAGE_BYTES == ring_end ? ring : stage + STAGE_BYTES;
  }

  group_sync();  // the ring has been read
  acc.write(reinterpret_cast<float*>(shared + slice * RING_BYTES));
  sum_and_store<BM, BN, PITCH, SLICES, CLUSTER_K, THREADS>(reinterpret_cast<const float*>(shared), RING_BYTES / 4, inbox, rank, OutputTile{C, M, N, m0, n0});
}
