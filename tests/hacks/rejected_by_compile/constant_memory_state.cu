// expect: mutable_global
// __constant__ memory has a backing store in global memory; through a laundered pointer it can be written.
__constant__ unsigned table[4];

extern "C" __global__ void kernel(const unsigned short* A, const unsigned short* B, unsigned* C, unsigned M, unsigned N, unsigned K) {
  unsigned long long address = reinterpret_cast<unsigned long long>(&table[0]);
  asm volatile("" : "+l"(address));
  volatile unsigned* state = reinterpret_cast<unsigned*>(address);
  if (state[0]) return;
  state[0] = 1;
  C[threadIdx.x] = A[threadIdx.x] + B[threadIdx.x] + M + N + K;
}
