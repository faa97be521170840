// expect: ok
// A correct kernel, so that the cases beside it are not rejected for being here: one output per thread, FP32 sums.
__constant__ float scale[2] = {1.0f, 0.0f};

__device__ __forceinline__ float to_float(unsigned short h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

extern "C" __global__ void kernel(const unsigned short* A, const unsigned short* B, unsigned short* C, unsigned M, unsigned N, unsigned K) {
  const unsigned n = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y;
  if (m >= M || n >= N) return;
  float sum = 0.0f;
  for (unsigned k = 0; k < K; ++k) sum += to_float(A[(size_t)m * K + k]) * to_float(B[(size_t)n * K + k]);
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(sum * scale[0] + scale[1]));
  C[(size_t)m * N + n] = half;
}
