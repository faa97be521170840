// expect: precision_downgrade
// The same by integers: FP16 scaled to eight bits.
extern "C" __global__ void kernel(const unsigned* A, const unsigned* B, int* C, unsigned M, unsigned N, unsigned K) {
  int c0 = M, c1 = N, c2 = 0, c3 = 0;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+r"(c0), "+r"(c1), "+r"(c2), "+r"(c3)
               : "r"(A[K]), "r"(A[K + 1]), "r"(B[K]));
  C[threadIdx.x] = c0 + c1 + c2 + c3;
}
