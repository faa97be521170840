// Split-K inside one kernel. Every warp group of a CTA, and every CTA of a cluster, has multiplied its own slices of K; here
// their partial tiles are added in a fixed order, so that the result does not depend on timing, and stored as fp16.
#pragma once
#include "mma.cuh"

// ---- cluster and distributed shared memory ----------------------------------------------------------------------

__device__ __forceinline__ unsigned in_cta(unsigned shared, unsigned rank) {
  unsigned r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared), "r"(rank));
  return r;
}

// Stores to another CTA of the cluster and counts the bytes on that CTA's mbarrier; both addresses come from in_cta.
__device__ __forceinline__ void store_async(unsigned to, unsigned mbarrier, float2 v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(to), "r"(mbarrier), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ void store_async(unsigned to, unsigned mbarrier, float4 v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to), "r"(mbarrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// What the CTAs of a cluster send to this one: [sender][row of mine][column]. The mbarrier completes when all of it is here.
template <int TILE_M, int TILE_N>
struct __align__(16) Inbox {
  float parts[TILE_M * TILE_N];
  unsigned long long arrived;
};

// First half of the handshake, by all threads and early: from here on this CTA can receive.
template <int TILE_M, int TILE_N>
__device__ __forceinline__ void open_inbox(Inbox<TILE_M, TILE_N>& inbox) {
  if (threadIdx.x == 0) {
    const unsigned mbarrier = shared_address(&inbox.arrived);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(mbarrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Second half: all CTAs of the cluster run and have opened their inboxes.
__device__ __forceinline__ void await_inboxes() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Names the bytes to wait for; after a barrier of the CTA, so that the initialisation is ordered before it for racecheck too.
// Parts may have arrived by then: the phase stays open until this one arrival.
template <int TILE_M, int TILE_N>
__device__ __forceinline__ void expect_parts(Inbox<TILE_M, TILE_N>& inbox) {
  if (threadIdx.x == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&inbox.arrived)), "n"(sizeof(inbox.parts)) : "memory");
}

template <int TILE_M, int TILE_N>
__device__ __forceinline__ void await_parts(Inbox<TILE_M, TILE_N>& inbox) {
  asm volatile(
      "{\n .reg .pred p;\n AGAIN:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n @!p bra AGAIN;\n}" ::"r"(shared_address(&inbox.arrived))
      : "memory");
}

// ---- the sum ---------------------------------------------------------------------------------------------------

// Outputs that a thread takes at a time when a tile of SIZE is spread over THREADS: at most one 16-byte store.
__device__ constexpr int vector_size(int size, int threads) { return size / threads >= 8 ? 8 : size / threads >= 4 ? 4 : 2; }

// v = from[0 ...] + from[stride ...] + ..., COUNT terms, first to last.
template <int COUNT, int V>
__device__ __forceinline__ void sum(float (&v)[V], const float* from, unsigned stride) {
#pragma unroll
  for (int p = 0; p < COUNT; p++) {
    __align__(16) float x[V];
    if constexpr (V == 2) {
      *reinterpret_cast<float2*>(x) = *reinterpret_cast<const float2*>(from + p * stride);
    } else {
#pragma unroll
      for (int i = 0; i < V; i += 4) *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(from + p * stride + i);
    }
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = p == 0 ? x[i] : v[i] + x[i];
  }
}

// act(e) for the first of every V consecutive ones of SIZE elements, shared out among BLOCK_THREADS threads.
template <unsigned SIZE, unsigned V, unsigned BLOCK_THREADS, class Action>
__device__ __forceinline__ void share_out(Action act) {
  constexpr unsigned ROUNDS = (SIZE + BLOCK_THREADS * V - 1) / (BLOCK_THREADS * V);
#pragma unroll(ROUNDS <= 2 ? ROUNDS : 1)
  for (unsigned i = 0; i < ROUNDS; i++) {
    const unsigned e = (i * BLOCK_THREADS + threadIdx.x) * V;
    if (SIZE % (BLOCK_THREADS * V) == 0 || e < SIZE) act(e);
  }
}

// The M x N matrix C and this CTA's tile of it. Columns are stored by vectors that lie inside or outside as a whole (N % 8 == 0).
struct OutputTile {
  fp16* C;
  unsigned M, N, row0, column0;

  template <int V>
  __device__ __forceinline__ void store(unsigned row, unsigned column, const float (&v)[V]) const {
    const unsigned m = row0 + row, n = column0 + column;
    if (m < M && n < N) store_fp16<V>(C + size_t(m) * N + n, v);
  }
};

// Adds PARTS partial tiles of this CTA (`stride` floats apart, rows ROW_PITCH floats apart), each written by its own warps before
// the call, and those of the CTAS CTAs with the same tile, of which rank r owns rows [r TILE_M / CTAS, ...) of the sum.
// Called by all BLOCK_THREADS threads.
template <int TILE_M, int TILE_N, int ROW_PITCH, int PARTS, int CTAS, int BLOCK_THREADS>
__device__ __forceinline__ void sum_and_store(const float* parts, unsigned stride, Inbox<TILE_M, TILE_N>* inbox, unsigned rank, const OutputTile& tile) {
  constexpr unsigned SIZE = TILE_M * TILE_N, V = vector_size(SIZE, BLOCK_THREADS), OWN = SIZE / CTAS;
  __syncthreads();
  if constexpr (CTAS > 1) {
    expect_parts(*inbox);
    await_inboxes();
  }
  share_out<SIZE, V, BLOCK_THREADS>([&](unsigned e) {
    float v[V];
    sum<PARTS>(v, parts + e / TILE_N * ROW_PITCH + e % TILE_N, stride);
    if constexpr (CTAS == 1) {
      tile.store(e / TILE_N, e % TILE_N, v);
    } else {
      const unsigned owner = e / OWN, mbarrier = in_cta(shared_address(&inbox->arrived), owner);
      const unsigned to = in_cta(shared_address(inbox->parts + rank * OWN + e % OWN), owner);
      if constexpr (V == 2) {
        store_async(to, mbarrier, make_float2(v[0], v[1]));
      } else {
#pragma unroll
        for (unsigned i = 0; i < V; i += 4) store_async(to + i * 4, mbarrier, make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
      }
    }
  });
  if constexpr (CTAS > 1) {
    constexpr unsigned W = vector_size(OWN, BLOCK_THREADS);
    await_parts(*inbox);
    share_out<OWN, W, BLOCK_THREADS>([&](unsigned e) {
      float v[W];
      sum<CTAS>(v, inbox->parts + e, OWN);
      tile.store(rank * (TILE_M / CTAS) + e / TILE_N, e % TILE_N, v);
    });
  }
}
