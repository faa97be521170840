// expect: mutable_global
// Module state that no C++ declaration shows: a PTX variable declared inside inline assembly.
extern "C" __global__ void kernel(const unsigned short* A, const unsigned short* B, unsigned* C, unsigned M, unsigned N, unsigned K) {
  unsigned before;
  asm volatile("{ .global .u32 hidden_counter;\n atom.global.add.u32 %0, [hidden_counter], 1; }" : "=r"(before));
  if (before) return;
  C[threadIdx.x] = A[threadIdx.x] + B[threadIdx.x] + M + N + K;
}
