// expect: forbidden_include
// Hack 21: the same, hidden from a line-by-line reader by a splice.
#inc\
lude "/etc/passwd"

extern "C" __global__ void kernel(const float* A, const float* B, float* C, unsigned M, unsigned N, unsigned K) {
  C[threadIdx.x] = A[threadIdx.x] + B[threadIdx.x] + M + N + K;
}
