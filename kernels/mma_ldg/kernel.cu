// HGEMM for the smallest shapes: every lane loads its mma.sync fragments straight from global memory, all at once, so that a
// launch costs one memory round trip. C[M,N] = A[M,K] B, fp16 in and out, FP32 accumulation. K % 8 == 0, N % 8 == 0.
//
// A CTA makes a 16 x BN tile by SLICES warps, each with its own slices of K (32 UNROLL long, in turn); CLUSTER_K CTAs of a
// cluster (grid z) do the same. Neither K nor the columns lie in memory order inside a warp:
//   - the 32 K of a block are dealt out so that a lane's four k pairs are eight neighbours, 16 bytes of a row of A;
//   - of TILES mma tiles side by side, tile j takes columns j, TILES + j, 2 TILES + j, ...: then a lane's 2 TILES results of a
//     row are neighbours, one store, and so are the TILES entries that it needs of a row of B stored K x N, one load.
#include "slice_sum.cuh"

constexpr unsigned BM = 16, TILES = BN / 8, THREADS = 32 * SLICES;
constexpr unsigned BLOCK = 32, SLICE = BLOCK * UNROLL, STEP = SLICE * SLICES * CLUSTER_K;
constexpr unsigned PITCH = BN == 32 ? BN + 4 : BN;  // of a partial tile in floats: no bank conflicts when lanes write rows

// B fragments of one block of 32 K: b[j] holds the four k pairs of tile j. `from` is the lane's first k, first column.
__device__ __forceinline__ void load_b(unsigned (&b)[TILES][4], const fp16* from, unsigned N, unsigned K, bool valid) {
  if constexpr (B_NK) {
#pragma unroll
    for (unsigned j = 0; j < TILES; j++) load_or_zero<8>(b[j], from + size_t(j) * K, valid);
  } else {
    unsigned row[8][(TILES + 1) / 2];
#pragma unroll
    for (unsigned r = 0; r < 8; r++) load_or_zero<TILES>(row[r], from + size_t(r) * N, valid);
#pragma unroll
    for (unsigned j = 0; j < TILES; j++)
#pragma unroll
      for (unsigned p = 0; p < 4; p++) b[j][p] = __byte_perm(row[2 * p][j / 2], row[2 * p + 1][j / 2], j % 2 ? 0x7632 : 0x5410);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mma_ldg(const fp16* A, const fp16* B, fp16* C, unsigned M, unsigned N, unsigned K) {
  const unsigned lane = threadIdx.x % 32, slice = threadIdx.x / 32, g = lane / 4, t = lane % 4, rank = CLUSTER_K > 1 ? blockIdx.z : 0;
  const unsigned tile_m = RASTER_BLOCK ? blockIdx.y : blockIdx.x, tile_n = RASTER_BLOCK ? blockIdx.z * gridDim.x + blockIdx.x : blockIdx.y;
  const unsigned m0 = tile_m * BM, n0 = tile_n * BN, first = (rank * SLICES + slice) * SLICE;
  const OutputTile tile{C, M, N, m0, n0};
  __shared__ Inbox<BM, BN> inbox;
  if constexpr (CLUSTER_K > 1) open_inbox(inbox);

  // Rows and columns past the edge repeat the last ones and are not stored; k past the edge are zeros on both sides.
  const unsigned n = min(n0 + g * TILES, N - TILES), k = first + t * 8;
  const fp16* a[2] = {A + size_t(min(m0 + g, M - 1)) * K + k, A + size_t(min(m0 + g + 8, M - 1)) * K + k};
  const fp16* b = B_NK ? B + size_t(n) * K + k : B + size_t(k) * N + n;
  float acc[TILES][4] = {};
#pragma unroll 1
  for (unsigned k0 = first; k0 < K; k0 += STEP) {
    unsigned fa[UNROLL][2][4], fb[UNROLL][TILES][4];
#pragma unroll
    for (unsigned i = 0; i < UNROLL; i++) {
      const bool valid = k0 + i * BLOCK + t * 8 < K;
#pragma unroll
      for (unsigned h = 0; h < 2; h++) load_or_zero<8>(fa[i][h], a[h] + i * BLOCK, valid);
      load_b(fb[i], b + (B_NK ? size_t(i) * BLOCK : size_t(i) * BLOCK * N), N, K, valid);
    }
#pragma unroll
    for (unsigned i = 0; i < UNROLL; i++)
#pragma unroll
      for (unsigned p = 0; p < 4; p += 2)
#pragma unroll
        for (unsigned j = 0; j < TILES; j++) mma_16816(acc[j], fa[i][0][p], fa[i][1][p], fa[i][0][p + 1], fa[i][1][p + 1], fb[i][j][p], fb[i][j][p + 1]);
    a[0] += STEP, a[1] += STEP;
    b += B_NK ? size_t(STEP) : size_t(STEP) * N;
  }

  // The lane's results of row g + 8 h, in column order from 2 TILES t.
  float v[2][2 * TILES];
#pragma unroll
  for (unsigned h = 0; h < 2; h++)
#pragma unroll
    for (unsigned i = 0; i < 2 * TILES; i++) v[h][i] = acc[i % TILES][h * 2 + i / TILES];
  if constexpr (SLICES * CLUSTER_K == 1) {
    tile.store(g, t * 2 * TILES, v[0]);
    tile.store(g + 8, t * 2 * TILES, v[1]);
  } else {
    __shared__ float4 parts[SLICES * BM * PITCH / 4];
    float* const part = reinterpret_cast<float*>(parts) + (slice * BM + g) * PITCH + t * 2 * TILES;
#pragma unroll
    for (unsigned h = 0; h < 2; h++) {
      if constexpr (TILES == 1) {
        *reinterpret_cast<float2*>(part + h * 8 * PITCH) = make_float2(v[h][0], v[h][1]);
      } else {
#pragma unroll
        for (unsigned i = 0; i < 2 * TILES; i += 4) *reinterpret_cast<float4*>(part + h * 8 * PITCH + i) = make_float4(v[h][i], v[h][i + 1], v[h][i + 2], v[h][i + 3]);
      }
    }
    sum_and_store<BM, BN, PITCH, SLICES, CLUSTER_K, THREADS>(reinterpret_cast<const float*>(parts), BM * PITCH, &inbox, rank, tile);
  }
}
