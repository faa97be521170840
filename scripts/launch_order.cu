// On which SM each CTA of a grid runs, as JSON.
//
// %smid by linear block index, one CTA an SM. CTAs of a cluster share a GPC, so launches in clusters of 16 tell which SMs do
// (scripts/launch_order.py reads it).
//
//     nvcc -arch=sm_90a -o launch_order scripts/launch_order.cu && ./launch_order > launch_order.json
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
__global__ void where(unsigned* out, long long* t) {
  unsigned s; asm volatile("mov.u32 %0, %%smid;" : "=r"(s));
  long long a = clock64();
  if (threadIdx.x == 0) { out[blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)] = s; }
  while (clock64() - a < 40000) {}
}
static void launch(int n, int cluster, int smem, unsigned* host) {
  static unsigned* dev = nullptr; if (!dev) cudaMalloc(&dev, 1 << 20);
  cudaLaunchConfig_t c = {}; c.gridDim = dim3(n); c.blockDim = dim3(128); c.dynamicSmemBytes = smem;
  cudaLaunchAttribute a; a.id = cudaLaunchAttributeClusterDimension; a.val.clusterDim.x = cluster; a.val.clusterDim.y = a.val.clusterDim.z = 1;
  if (cluster > 1) { c.attrs = &a; c.numAttrs = 1; }
  cudaFuncSetAttribute(where, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  cudaFuncSetAttribute(where, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaError_t e = cudaLaunchKernelEx(&c, where, dev, (long long*)nullptr); cudaDeviceSynchronize();
  if (e != cudaSuccess) { fprintf(stderr, "%s\n", cudaGetErrorString(e)); exit(1); }
  cudaMemcpy(host, dev, n * 4, cudaMemcpyDeviceToHost);
}
int main() {
  unsigned h[1024];
  printf("{");
  for (int round = 0; round < 12; round++) { launch(16 * 7, 16, 200 << 10, h); printf("\"c16_%d\": [", round); for (int i = 0; i < 112; i++) printf("%s%u", i ? "," : "", h[i]); printf("],\n"); }
  for (int round = 0; round < 3; round++) { launch(132, 1, 200 << 10, h); printf("\"plain_%d\": [", round); for (int i = 0; i < 132; i++) printf("%s%u", i ? "," : "", h[i]); printf("],\n"); }
  launch(264, 1, 100 << 10, h); printf("\"plain2\": ["); for (int i = 0; i < 264; i++) printf("%s%u", i ? "," : "", h[i]); printf("],\n");
  for (int round = 0; round < 2; round++) { launch(132, 2, 200 << 10, h); printf("\"c2_%d\": [", round); for (int i = 0; i < 132; i++) printf("%s%u", i ? "," : "", h[i]); printf("],\n"); }
  launch(128, 4, 200 << 10, h); printf("\"c4\": ["); for (int i = 0; i < 128; i++) printf("%s%u", i ? "," : "", h[i]); printf("]}\n");
}
