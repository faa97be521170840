// expect: mutable_global
// Hack 8: counts its calls and does the work only in some of them.
extern "C" __global__ void kernel(const unsigned short* A, const unsigned short* B, unsigned short* C, unsigned M, unsigned N, unsigned K) {
  static unsigned calls;
  if (atomicAdd(&calls, 1) % 2) return;
  C[threadIdx.x] = A[threadIdx.x] + B[threadIdx.x] + M + N + K;
}
