// expect: precision_downgrade
// Hack 17 at the inputs: products of BF16, which has three bits fewer than FP16.
extern "C" __global__ void kernel(const unsigned* A, const unsigned* B, float* C, unsigned M, unsigned N, unsigned K) {
  float c0 = M, c1 = N, c2 = 0, c3 = 0;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(A[K]), "r"(A[K + 1]), "r"(A[K + 2]), "r"(A[K + 3]), "r"(B[K]), "r"(B[K + 1]));
  C[threadIdx.x] = c0 + c1 + c2 + c3;
}
