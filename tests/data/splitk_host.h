// What tests/test_splitk_exchange.py puts before the kernel's source: CUDA's words, and stand-ins for what is PTX.
#include <pthread.h>
#include <unistd.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>
struct Dim { unsigned x, y, z; };
static thread_local Dim threadIdx;
static Dim blockIdx, gridDim;
struct float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
template <class T> static T __shfl_sync(unsigned, T value, int) { return value; }
static void __syncwarp() {}
static void __syncthreads();
using std::max, std::min;
#define CHECK(x) do { if (!(x)) { printf("line %d: %s\n", __LINE__, #x); fflush(stdout); _exit(1); } } while (0)

static unsigned phase;                                   // 0: the ring, 1: send, 2: receive
static unsigned M_, N_, K_;
static std::vector<unsigned char> shared_of_cta;         // of the CTA that runs
static std::vector<unsigned char> workspace;
static size_t __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - shared_of_cta.data(); }
struct TensorMap;
static std::multiset<std::pair<int, int>> loaded_a, loaded_b;  // (k, row or column) of the boxes of the CTA that runs

static unsigned pack_half2(float a, float b) { return unsigned(short(a)) << 0 & 0xffff | unsigned(short(b)) << 16; }  // small integers

// ---- the ring, in phase 0: a thread for the producer and one for lane 0 of each consumer warp ----
struct Barrier { long expected, arrivals, bytes; unsigned phase; };
static std::mutex lock;
static std::map<unsigned, Barrier> barriers;                     // by address
static std::map<unsigned, std::pair<int, int>> boxes;            // what lies at an address: (k, row or column)
static pthread_barrier_t all_threads;
static void __syncthreads() { if (phase == 0) pthread_barrier_wait(&all_threads); }
static void mbar_init(unsigned bar, unsigned arrivals) {
  std::lock_guard<std::mutex> guard(lock);
  if (phase == 0) CHECK(barriers.insert({bar, Barrier{arrivals, 0, 0, 0}}).second);
}
static void change(unsigned bar, long arrivals, long bytes) {
  Barrier& b = barriers.at(bar);
  b.arrivals += arrivals, b.bytes += bytes;
  CHECK(b.arrivals <= b.expected);
  if (b.arrivals == b.expected && b.bytes == 0) b.arrivals = 0, b.phase++;
}
static void mbar_expect(unsigned bar, unsigned bytes) { std::lock_guard<std::mutex> guard(lock); change(bar, 1, bytes); }
static void mbar_arrive(unsigned bar) { std::lock_guard<std::mutex> guard(lock); change(bar, 1, 0); }
static void mbar_wait(unsigned bar, unsigned parity) {
  for (int i = 0; i < 100000; i++) {
    { std::lock_guard<std::mutex> guard(lock); if ((barriers.at(bar).phase & 1) != parity) return; }
    usleep(20);
  }
  CHECK(!"waits for ever");
}
static void tma_load(unsigned dst, const TensorMap* map, int x, int y, unsigned bar) {
  const bool a = *(const char*)map == 'A';
  const unsigned bytes = 128 * (a ? BM : B_NK ? BN : BK);
  CHECK(dst % 1024 == 0 && dst + bytes <= shared_of_cta.size());
  std::lock_guard<std::mutex> guard(lock);
  const std::pair<int, int> box = a || B_NK ? std::pair(x, y) : std::pair(y, x);
  (a ? loaded_a : loaded_b).insert(box);
  boxes[dst] = box;
  change(bar, 0, -long(bytes));
}
struct Operand { unsigned address; std::pair<int, int> box; };
static thread_local std::vector<Operand> unread[2];  // by wgmmas of the batch that is open, and of the one before it
static std::pair<int, int> read_box(unsigned address) {
  std::lock_guard<std::mutex> guard(lock);
  const auto found = std::prev(boxes.upper_bound(address));
  unread[0].push_back({found->first, found->second});
  return found->second;
}
static unsigned box_of(unsigned address) { std::lock_guard<std::mutex> guard(lock); return std::prev(boxes.upper_bound(address))->first; }
static void on_mma(float* d, unsigned long long a, unsigned long long b);
static void wgmma_commit() {}
template <int PENDING>
static void wgmma_wait() {  // what has been read up to here must not have changed
  if (threadIdx.x / 32 % 2) usleep(50);
  std::lock_guard<std::mutex> guard(lock);
  for (unsigned i = PENDING; i < 2; i++)
    for (const Operand& o : unread[i]) CHECK(boxes.at(o.address) == o.box);
  unread[1] = std::move(unread[0]), unread[0].clear();
}

static float4 load_part(const float4* p) { return *p; }
static void store_part(bool keep, unsigned own, float4* p, float4 v) {
  if (keep) memcpy(&shared_of_cta.at(own + 15) - 15, &v, 16);
  else *p = v;
}
static void count_up(unsigned* counter) { ++*counter; }
static unsigned load_counter(const unsigned* counter) { return *counter; }
static void after_multiply(float* acc);
