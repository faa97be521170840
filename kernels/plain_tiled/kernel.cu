// HGEMM for any M, N, K >= 1, whatever their parity: scalar loads with bounds checks, so that no address has to be aligned to more
// than an element, and mma.sync. C[M,N] = A[M,K] B, fp16 in and out, FP32 accumulation. Written to be read, not to be fast.
//
// Four warps make a BM x BN tile of C, each a quarter of it, from tiles of A and B of BK along K in shared memory.
#include "mma.cuh"

constexpr unsigned BK = 32, THREADS = 128, WARP_M = BM / 2, WARP_N = BN / 2, TILES_M = WARP_M / 16, TILES_N = WARP_N / 8;
constexpr unsigned PITCH = BK + 8;  // halves in a row in shared memory: rows g and column pairs t of a fragment lie in different banks

// Tile rows [row0, row0 + ROWS) x [k0, k0 + BK) of a matrix of `rows` x `K` into shared memory, zeros outside of it. Entry (row, k) is
// from[row * row_stride + k * k_stride]; neighbouring threads take neighbours along the one whose stride is 1.
template <unsigned ROWS, bool K_CONTIGUOUS>
__device__ __forceinline__ void load_tile(fp16 (&to)[ROWS][PITCH], const fp16* from, unsigned row0, unsigned k0, unsigned rows, unsigned K, size_t stride) {
#pragma unroll 16  // loads in flight
  for (unsigned j = 0; j < ROWS * BK / THREADS; j++) {
    const unsigned i = j * THREADS + threadIdx.x;
    const unsigned row = K_CONTIGUOUS ? i / BK : i % ROWS, k = K_CONTIGUOUS ? i % BK : i / ROWS;
    const bool inside = row0 + row < rows && k0 + k < K;
    const size_t at = K_CONTIGUOUS ? (row0 + row) * stride + k0 + k : (k0 + k) * stride + row0 + row;
    to[row][k] = inside ? from[at] : fp16(0);
  }
}

// Two neighbours along K of a tile.
__device__ __forceinline__ unsigned pair(const fp16 (&row)[PITCH], unsigned k) { return *reinterpret_cast<const unsigned*>(&row[k]); }

extern "C" __global__ void __launch_bounds__(THREADS) plain_tiled(const fp16* A, const fp16* B, fp16* C, unsigned M, unsigned N, unsigned K) {
  __shared__ __align__(16) fp16 a[BM][PITCH], b[BN][PITCH];
  const unsigned tiles_m = (M + BM - 1) / BM, m0 = blockIdx.x % tiles_m * BM, n0 = blockIdx.x / tiles_m * BN;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const unsigned row = warp / 2 * WARP_M + g, column = warp % 2 * WARP_N;

  float acc[TILES_M][TILES_N][4] = {};
#pragma unroll 1
  for (unsigned k0 = 0; k0 < K; k0 += BK) {
    load_tile<BM, true>(a, A, m0, k0, M, K, K);
    load_tile<BN, B_NK>(b, B, n0, k0, N, K, B_NK ? K : N);
    __syncthreads();
#pragma unroll
    for (unsigned k = t * 2; k < BK; k += 16) {
      unsigned fb[TILES_N][2];
#pragma unroll
      for (unsigned n = 0; n < TILES_N; n++) fb[n][0] = pair(b[column + n * 8 + g], k), fb[n][1] = pair(b[column + n * 8 + g], k + 8);
#pragma unroll
      for (unsigned m = 0; m < TILES_M; m++) {
        const fp16(&upper)[PITCH] = a[row + m * 16], (&lower)[PITCH] = a[row + m * 16 + 8];
#pragma unroll
        for (unsigned n = 0; n < TILES_N; n++) mma_16816(acc[m][n], pair(upper, k), pair(lower, k), pair(upper, k + 8), pair(lower, k + 8), fb[n][0], fb[n][1]);
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (unsigned m = 0; m < TILES_M; m++)
#pragma unroll
    for (unsigned n = 0; n < TILES_N; n++)
#pragma unroll
      for (unsigned i = 0; i < 4; i++) {
        const unsigned y = m0 + row + m * 16 + i / 2 * 8, x = n0 + column + n * 8 + t * 2 + i % 2;
        if (y < M && x < N) C[size_t(y) * N + x] = fp16(pack(acc[m][n][i], 0));
      }
}
