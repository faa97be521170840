// C = A B^T at 256 x 256 x 256, all of it row-major: 128 CTAs make 16 x 32 each. The four warps of a CTA take 64 K each and
// load their fragments straight from global memory, all at once; what they have is summed through shared memory.
//
// Inside a warp neither K nor the columns lie in memory order: of 32 K a lane takes eight neighbours, one load of a row, and
// tile j of four takes columns j, 4 + j, 8 + j, ..., so that a lane's eight results of a row are neighbours, too.
#include <cuda_fp16.h>

constexpr int N = 256, K = 256, BM = 16, BN = 32, WARPS = 4, SLICE = K / WARPS, BLOCKS = SLICE / 32, TILES = BN / 8;
constexpr int PITCH = BN + 4;  // floats; no bank conflicts when lanes write rows

__device__ __forceinline__ void mma_16816(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load(const __half* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }

// One CTA an SM will do: with registers to spare, all loads are issued before the first mma waits for one.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) gemm(const __half* A, const __half* B, __half* C) {
  __shared__ __align__(16) float parts[WARPS][BM][PITCH];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int m0 = blockIdx.y * BM, n0 = blockIdx.x * BN, k0 = warp * SLICE + t * 8;

  uint4 a[BLOCKS][2], b[BLOCKS][TILES];
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) {
#pragma unroll
    for (int h = 0; h < 2; h++) a[i][h] = load(A + (m0 + g + h * 8) * K + k0 + i * 32);
#pragma unroll
    for (int j = 0; j < TILES; j++) b[i][j] = load(B + (n0 + g * TILES + j) * K + k0 + i * 32);
  }
  float acc[TILES][4] = {};
#pragma unroll
  for (int i = 0; i < BLOCKS; i++)
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      mma_16816(acc[j], a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y, b[i][j].x, b[i][j].y);
      mma_16816(acc[j], a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w, b[i][j].z, b[i][j].w);
    }

#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int c = 0; c < 2; c++) {  // columns 8 t + 4 c ... of the lane's eight
      const int d = 2 * h + c;
      *reinterpret_cast<float4*>(&parts[warp][g + h * 8][t * 8 + c * 4]) = make_float4(acc[0][d], acc[1][d], acc[2][d], acc[3][d]);
    }
  __syncthreads();

  const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 4;
  float4 sum = *reinterpret_cast<const float4*>(&parts[0][row][column]);
#pragma unroll
  for (int w = 1; w < WARPS; w++) {
    const float4 part = *reinterpret_cast<const float4*>(&parts[w][row][column]);
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  __align__(8) const __half2 out[2] = {__floats2half2_rn(sum.x, sum.y), __floats2half2_rn(sum.z, sum.w)};
  *reinterpret_cast<uint2*>(&C[(m0 + row) * N + n0 + column]) = *reinterpret_cast<const uint2*>(out);
}
