// expect: unresolved_symbol
// Hack 11: the device heap outlives a launch.
extern "C" __global__ void kernel(const unsigned short* A, const unsigned short* B, unsigned* C, unsigned M, unsigned N, unsigned K) {
  unsigned* kept = static_cast<unsigned*>(malloc(4 * K));
  if (kept == nullptr) return;
  kept[0] = A[0];
  C[threadIdx.x] = kept[0] + B[threadIdx.x] + M + N;
}
