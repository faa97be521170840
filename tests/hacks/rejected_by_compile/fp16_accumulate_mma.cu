// expect: fp16_accumulate
// Hack 17: the tensor core adds up in FP16, at twice the rate, sold as FP32 accumulation.
extern "C" __global__ void kernel(const unsigned* A, const unsigned* B, unsigned* C, unsigned M, unsigned N, unsigned K) {
  unsigned c0 = 0, c1 = 0;
  for (unsigned k = 0; k < K; k += 16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
                 : "+r"(c0), "+r"(c1)
                 : "r"(A[k]), "r"(A[k + 1]), "r"(A[k + 2]), "r"(A[k + 3]), "r"(B[k]), "r"(B[k + 1]));
  C[threadIdx.x] = c0 + c1 + M + N;
}
