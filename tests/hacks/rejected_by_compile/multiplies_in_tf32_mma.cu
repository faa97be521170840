// expect: precision_downgrade
// The same by TF32.
extern "C" __global__ void kernel(const unsigned* A, const unsigned* B, float* C, unsigned M, unsigned N, unsigned K) {
  float c0 = M, c1 = N, c2 = 0, c3 = 0;
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(A[K]), "r"(A[K + 1]), "r"(B[K]));
  C[threadIdx.x] = c0 + c1 + c2 + c3;
}
