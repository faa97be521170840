// What tests/test_splitk_exchange.py puts before the kernel's source: CUDA's words, and stand-ins for what is PTX.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>
#include <vector>
struct Dim { unsigned x, y, z; } threadIdx, blockIdx, gridDim;
struct float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
template <class T> static T __shfl_sync(unsigned, T value, int) { return value; }
static void __syncwarp() {}
static void __syncthreads() {}
static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static unsigned long long __umul64hi(unsigned long long, unsigned long long) { abort(); }
using std::max, std::min;
#define CHECK(x) do { if (!(x)) { printf("line %d: %s\n", __LINE__, #x); exit(1); } } while (0)

static unsigned phase;                                   // 0: the producer, 1: send, 2: receive
static unsigned M_, N_, K_;
static std::vector<unsigned char> shared_of_cta;         // of the CTA that runs
static std::vector<unsigned char> workspace;
static size_t __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - shared_of_cta.data(); }
struct TensorMap;
static std::multiset<std::pair<int, int>> loaded_a, loaded_b;  // (k, row or column) of the boxes of the CTA that runs

static unsigned pack_half2(float a, float b) { return unsigned(short(a)) << 0 & 0xffff | unsigned(short(b)) << 16; }  // small integers
static void tma_load(unsigned dst, const TensorMap* map, int x, int y, unsigned) {
  CHECK(dst < shared_of_cta.size());
  if (*(const char*)map == 'A') loaded_a.insert({x, y});
  else if (B_NK) loaded_b.insert({x, y});
  else loaded_b.insert({y, x});
}
static float4 load_part(const float4* p) { return *p; }
static void store_part(float4* p, float4 v) { *p = v; }
static void store_part(bool keep, unsigned own, float4* p, float4 v) {
  if (keep) memcpy(&shared_of_cta.at(own + 15) - 15, &v, 16);
  else *p = v;
}
static void count_up(unsigned* counter) { ++*counter; }
static unsigned load_counter(const unsigned* counter) { return *counter; }
static void multiply_on_host(float* acc);
