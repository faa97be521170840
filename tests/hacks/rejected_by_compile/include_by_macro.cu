// expect: forbidden_include
// Hack 21: a header whose name the check cannot see.
#define HEADER </etc/passwd>
#include HEADER

extern "C" __global__ void kernel(const float* A, const float* B, float* C, unsigned M, unsigned N, unsigned K) {
  C[threadIdx.x] = A[threadIdx.x] + B[threadIdx.x] + M + N + K;
}
