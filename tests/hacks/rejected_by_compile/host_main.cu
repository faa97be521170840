// expect: host_code
// Hacks 1 and 3 begin with host code.
extern "C" __global__ void kernel(const float* A, const float* B, float* C, unsigned M, unsigned N, unsigned K) {
  C[threadIdx.x] = A[threadIdx.x] + B[threadIdx.x] + M + N + K;
}

int main() { return 0; }
