// Device side of the gate: inputs, poison, guards, hashes and comparisons. Compiled once per process by NVRTC.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// One row of counters per check; the host reads them once.
struct Stats { u64 mismatches, unwritten, max_error_bits, first_bad; };

__device__ u64 mix(u64 x) {  // splitmix64 finaliser
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
__device__ u16 to_half(float x) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h; }
__device__ float from_half(u16 h) { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h)); return x; }
__device__ float unit(u32 x) { return (x + 0.5f) * 2.3283064e-10f; }
__device__ float normal(u64 seed, u64 i) {  // Box-Muller on 64 hashed bits
  const u64 r = mix(seed ^ mix(i));
  return sqrtf(-2.0f * logf(fminf(unit((u32)r), 0.99999994f))) * cospif(2.0f * unit((u32)(r >> 32)));
}

enum Kind { BINARY, INTEGER, NORMAL, UNIFORM, SUBNORMAL, PAIR_A, PAIR_B, BITS, WIDE };

// `inner` is the contiguous dimension; k runs along it when k_inner. The PAIR kinds look at k: consecutive k cancel up to
// 2^-8, so that |C| is small beside |A||B|. WIDE has at most 4 nonzeros along k, integers of 11 bits.
extern "C" __global__ void fill(u16* out, u64 n, int kind, float p, u64 seed, u64 inner, int k_inner, u64 K) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
    const u64 r = mix(seed ^ mix(i));
    u16 v;
    switch (kind) {
      case BINARY: v = to_half(unit((u32)r) < p ? 1.0f : 0.0f); break;
      case INTEGER: v = to_half((float)(int)(r % (u64)(2 * (int)p + 1)) - p); break;
      case NORMAL: v = to_half(normal(seed, i) * p); break;
      case UNIFORM: v = to_half((2.0f * unit((u32)r) - 1.0f) * p); break;
      case SUBNORMAL: v = (u16)((r & 0x8000) | (1 + (r >> 20) % 1023)); break;
      case PAIR_A:
      case PAIR_B: {
        const u64 k = k_inner ? i % inner : i / inner, other = k_inner ? i / inner : i % inner, even = k & ~1ull;
        const float base = from_half(to_half(normal(seed, other * (K + 1) + even)));
        if (kind == PAIR_A) v = to_half(base);
        else v = to_half((k & 1) ? -base + 0.00390625f * normal(~seed, i) : base);
        break;
      }
      case WIDE: {
        const u64 k = k_inner ? i % inner : i / inner, other = k_inner ? i / inner : i % inner, period = (K + 3) / 4;
        v = k % period == mix(seed ^ ~mix(other)) % period ? to_half((float)(int)(r % (u64)(2 * (int)p + 1)) - p) : 0;
        break;
      }
      default: v = (u16)(r >> 13);
    }
    out[i] = v;
  }
}

extern "C" __global__ void hash_words(const u16* x, u64 n, u64* out) {
  u64 h = 0;
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) h += mix(i << 16 | x[i]);
  for (int d = 16; d; d >>= 1) h += __shfl_xor_sync(~0u, h, d);
  if (threadIdx.x % 32 == 0) atomicAdd(out, h);
}

extern "C" __global__ void count_not(const u16* x, u64 n, u16 pattern, u64* out) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
    if (x[i] != pattern) atomicAdd(out, 1ull);
}

// Rounding of a double to FP16 to nearest even, overflow to infinity, exact for subnormals (IEEE 754 binary16).
__device__ double fl16(double x) {
  if (!(fabs(x) < 1e300)) return x;  // infinities and NaN
  const int e = x == 0 ? -14 : max(ilogb(x), -14);
  const double q = scalbn(1.0, e - 10), r = rint(x / q) * q;
  return fabs(r) >= 65536.0 ? copysign(__longlong_as_double(0x7FF0000000000000ll), x) : r;
}

// Words behind the n outputs of each of `slots` slots that are not the pattern any more.
extern "C" __global__ void count_gaps(const u16* ring, u64 n, u64 stride, u64 slots, u16 pattern, u64* out) {
  const u64 gap = stride - n;
  for (u64 j = blockIdx.x * (u64)blockDim.x + threadIdx.x; j < gap * slots; j += (u64)gridDim.x * blockDim.x)
    if (ring[j / gap * stride + n + j % gap] != pattern) atomicAdd(out, 1ull);
}

enum Mode { EXACT, INTERVAL, CLAUSE };

// c against ref = FP64 product, bound = |A||B|. Where ref is NaN c must be NaN; where it is infinite c must be that infinity.
extern "C" __global__ void compare(const u16* c, const double* ref, const double* bound, u64 n, u64 offset, int mode, double gamma, u16 poison, Stats* out) {
  u64 bad = 0, unwritten = 0, first = ~0ull;
  double worst = 0;
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
    const double r = ref[i], x = from_half(c[i]);
    bool ok;
    if (isnan(r)) ok = isnan(x);
    else if (isinf(r)) ok = x == r;
    else if (mode == EXACT) ok = x == fl16(r);
    else if (mode == INTERVAL) { const double beta = gamma * bound[i]; ok = fl16(r - beta) <= x && x <= fl16(r + beta); }
    else ok = fabs(x - r) <= fmax(1.0, 0.01 * fabs(r));
    if (c[i] == poison) { unwritten++; ok = false; }
    if (!ok) { bad++; first = min(first, offset + i); }
    const double error = fabs(x - r);
    if (error < 1e300) worst = fmax(worst, error);
  }
  if (bad) { atomicAdd(&out->mismatches, bad); atomicMin(&out->first_bad, first); }
  if (unwritten) atomicAdd(&out->unwritten, unwritten);
  for (int d = 16; d; d >>= 1) worst = fmax(worst, __shfl_xor_sync(~0u, worst, d));
  if (threadIdx.x % 32 == 0 && worst > 0) atomicMax(&out->max_error_bits, (u64)__double_as_longlong(worst));
}

// `slots` copies of n outputs against one golden copy: bitwise, or (loose) by the reviewers' clause.
extern "C" __global__ void compare_copies(const u16* ring, const u16* golden, u64 n, u64 slots, u64 stride, int loose, u16 poison, Stats* out) {
  u64 bad = 0, unwritten = 0;
  for (u64 j = blockIdx.x * (u64)blockDim.x + threadIdx.x; j < n * slots; j += (u64)gridDim.x * blockDim.x) {
    const u64 slot = j / n, i = j % n;
    const u16 x = ring[slot * stride + i], g = golden[i];
    bool ok = x == g;
    if (loose && !ok) { const float a = from_half(x), b = from_half(g); ok = fabsf(a - b) <= fmaxf(1.0f, 0.01f * fabsf(b)); }
    if (x == poison) unwritten++;
    bad += !ok;
  }
  if (bad) atomicAdd(&out->mismatches, bad);
  if (unwritten) atomicAdd(&out->unwritten, unwritten);
}

extern "C" __global__ void max_difference(const u16* a, const u16* b, u64 n, Stats* out) {
  double worst = 0;
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
    const double d = fabs((double)from_half(a[i]) - (double)from_half(b[i]));
    if (d < 1e300) worst = fmax(worst, d);
  }
  for (int d = 16; d; d >>= 1) worst = fmax(worst, __shfl_xor_sync(~0u, worst, d));
  if (threadIdx.x % 32 == 0 && worst > 0) atomicMax(&out->max_error_bits, (u64)__double_as_longlong(worst));
}

extern "C" __global__ void empty() {}
