// expect: mutable_global, unresolved_symbol
// Hack 4: printf is a way out of the kernel to the process's output.
extern "C" __global__ void kernel(const unsigned short* A, const unsigned short* B, unsigned* C, unsigned M, unsigned N, unsigned K) {
  printf("time_us: %d\n", 0);
  C[threadIdx.x] = A[threadIdx.x] + B[threadIdx.x] + M + N + K;
}
