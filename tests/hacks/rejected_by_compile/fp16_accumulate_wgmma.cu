// expect: fp16_accumulate
// Hack 17 again, by wgmma.
extern "C" __global__ void kernel(const unsigned long long* A, const unsigned long long* B, unsigned* C, unsigned M, unsigned N, unsigned K) {
  unsigned c0 = M, c1 = N;
  asm volatile(
      "wgmma.fence.sync.aligned;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%0,%1}, %2, %3, 1, 1, 1, 0, 0;\n"
      "wgmma.commit_group.sync.aligned;\n"
      "wgmma.wait_group.sync.aligned 0;"
      : "+r"(c0), "+r"(c1)
      : "l"(A[K]), "l"(B[K]));
  C[threadIdx.x] = c0 + c1;
}
