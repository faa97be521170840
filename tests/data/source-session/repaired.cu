// C = A B^T at 256 x 256 x 256, all of it row-major: 16 CTAs make 64 x 64 each, by four warps of 32 x 32. The operands go
// through shared memory, 32 K at a time; the next tile is in flight while this one is multiplied.
#include <cuda_fp16.h>

constexpr int N = 256, K = 256, BM = 64, BN = 64, BK = 32;
constexpr int PITCH = BK + 8;  // 80 bytes a row: the rows that a warp reads together lie in different banks

__device__ __forceinline__ void mma_16816(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ unsigned pair(const __half* p) { return *reinterpret_cast<const unsigned*>(p); }

extern "C" __global__ void __launch_bounds__(128, 1) gemm(const __half* A, const __half* B, __half* C) {
  __shared__ __align__(16) __half a_tile[BM][PITCH];
  __shared__ __align__(16) __half b_tile[BN][PITCH];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_m = threadIdx.x / 64 * 32, warp_n = threadIdx.x / 32 % 2 * 32;
  // A thread copies 16 bytes of two rows of either tile.
  const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 8;
  const __half* const a_from = A + (blockIdx.y * BM + row) * K + column;
  const __half* const b_from = B + (blockIdx.x * BN + row) * K + column;
  uint4 a_next[2], b_next[2];
  float acc[2][4][4] = {};

  auto fetch = [&](int k0) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a_next[i] = *reinterpret_cast<const uint4*>(a_from + i * 32 * K + k0);
      b_next[i] = *reinterpret_cast<const uint4*>(b_from + i * 32 * K + k0);
    }
  };
  auto put = [&] {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      *reinterpret_cast<uint4*>(&a_tile[row + i * 32][column]) = a_next[i];
      *reinterpret_cast<uint4*>(&b_tile[row + i * 32][column]) = b_next[i];
    }
  };
  auto multiply = [&] {
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
      unsigned a[2][4], b[4][2];
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int r = 0; r < 4; r++) a[i][r] = pair(&a_tile[warp_m + i * 16 + g + r % 2 * 8][k + 2 * t + r / 2 * 8]);
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) b[j][r] = pair(&b_tile[warp_n + j * 8 + g][k + 2 * t + r * 8]);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) mma_16816(acc[i][j], a[i], b[j]);
    }
  };

  fetch(0);
#pragma unroll 1
  for (int k0 = BK; k0 < K; k0 += BK) {
    put();
    __syncthreads();
    fetch(k0);
    multiply();
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int m = blockIdx.y * BM + warp_m + i * 16 + g + h * 8, n = blockIdx.x * BN + warp_n + j * 8 + 2 * t;
        *reinterpret_cast<__half2*>(&C[m * N + n]) = __floats2half2_rn(acc[i][j][2 * h], acc[i][j][2 * h + 1]);
      }
}
