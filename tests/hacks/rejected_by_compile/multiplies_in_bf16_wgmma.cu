// expect: precision_downgrade
// The same by wgmma with BF16 inputs.
extern "C" __global__ void kernel(const unsigned long long* A, const unsigned long long* B, float* C, unsigned M, unsigned N, unsigned K) {
  float c0 = M, c1 = N, c2 = 0, c3 = 0;
  asm volatile(
      "wgmma.fence.sync.aligned;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;\n"
      "wgmma.commit_group.sync.aligned;\n"
      "wgmma.wait_group.sync.aligned 0;"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "l"(A[K]), "l"(B[K]));
  C[threadIdx.x] = c0 + c1 + c2 + c3;
}
