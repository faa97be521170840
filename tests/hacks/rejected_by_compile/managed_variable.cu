// expect: mutable_global
// Unified memory keeps state, and the host can read it.
__managed__ int calls;

extern "C" __global__ void kernel(const unsigned short* A, const unsigned short* B, unsigned* C, unsigned M, unsigned N, unsigned K) {
  if (calls++) return;
  C[threadIdx.x] = A[threadIdx.x] + B[threadIdx.x] + M + N + K;
}
