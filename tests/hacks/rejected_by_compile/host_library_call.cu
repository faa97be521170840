// expect: host_code
// Hack 19: the library under another name, without even including its header.
extern "C" int cublasGemmEx(...);

extern "C" __global__ void kernel(const float* A, const float* B, float* C, unsigned M, unsigned N, unsigned K) {
  C[threadIdx.x] = A[threadIdx.x] + B[threadIdx.x] + M + N + K;
}
