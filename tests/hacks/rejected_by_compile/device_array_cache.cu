// expect: mutable_global
// Hack 10: the output of the first call is kept in a __device__ array and copied out afterwards.
__device__ unsigned short cache[64 * 64];
__device__ int filled;

extern "C" __global__ void kernel(const unsigned short* A, const unsigned short* B, unsigned short* C, unsigned M, unsigned N, unsigned K) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= M * N) return;
  if (filled == 0) cache[i % 4096] = A[i % K] + B[i % K];
  C[i] = cache[i % 4096];
  __threadfence();
  if (i == 0) filled = 1;
}
