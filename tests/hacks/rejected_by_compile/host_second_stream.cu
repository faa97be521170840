// expect: host_code
// Hack 1: the work is launched on another stream, outside the timed region.
extern "C" __global__ void kernel(const float* A, const float* B, float* C, unsigned M, unsigned N, unsigned K) {
  C[threadIdx.x] = A[threadIdx.x] + B[threadIdx.x] + M + N + K;
}

void run(const float* a, const float* b, float* c, unsigned m, unsigned n, unsigned k) {
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  kernel<<<1, 32, 0, stream>>>(a, b, c, m, n, k);
}
