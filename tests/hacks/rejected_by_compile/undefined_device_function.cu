// expect: unresolved_symbol
// Something the cubin does not bring along.
extern __device__ float somewhere_else(float);

extern "C" __global__ void kernel(const float* A, const float* B, float* C, unsigned M, unsigned N, unsigned K) {
  C[threadIdx.x] = somewhere_else(A[threadIdx.x] + B[threadIdx.x] + M + N + K);
}
