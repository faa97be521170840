// Persistent, warp-specialised TMA + wgmma HGEMM: C = A * B, FP16 in, FP32 accumulate, FP16 out, for sm_90a.
//
// One producer thread walks the output tiles of its CTA and keeps a ring of STAGES shared-memory stages full (BM x 64 of
// A, BN x 64 of B, 128-byte swizzle); full[s] counts the bytes of a stage, empty[s] the consumer warps that are done with
// it. It runs ahead across tiles, so the loads of the next tile overlap the epilogue of this one. Consumer warpgroups
// run one batch of wgmma behind the newest stage and release the stage before it. They work in one of two ways.
// Cooperative: all share a tile, BM / CONSUMERS rows each. Ping-pong: two own alternate tiles, so that one stores while
// the other multiplies; `turn` lets one at a time into the main loop, without which a warpgroup could take a full[s] of
// the ring's previous round for its own. C goes through a warp's own staging buffer (stmatrix, swizzled) and out by TMA
// in pieces of 16 rows, so the epilogue needs no barrier above the warp. A cluster of CLUSTER_M x CLUSTER_N CTAs works
// on as many neighbouring tiles: A is multicast along N and B along M, each CTA fetching its share, and empty[s] then
// counts the warps of every CTA that the stage was sent to. Tails cost no code: TMA fills what is out of bounds with
// zeros (and counts it as bytes), and clips what is stored. But they cost time, as in wgmma_tile; with RAGGED boxes of A
// have no more rows than A, and its last tile begins BM rows before the end. B is N x K (B_NK), or K x N and fetched 64
// columns at a time.
#include "ptx.cuh"
#include "wgmma_atoms.cuh"

// ---- what the knobs imply; the launch constants in family.yaml repeat THREADS and SMEM_BYTES ----
constexpr int BK = 64;  // halves: one row of the 128-byte swizzle
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;
constexpr int SHARE = PINGPONG ? 1 : CONSUMERS;  // warpgroups that read one stage
constexpr int WG_ROWS = BM / SHARE, MI = WG_ROWS / 64;
constexpr int PRODUCER_WARPS = MI * BN / 2 > 128 ? 4 : 1;  // setmaxnreg wants a whole producer warpgroup
constexpr int THREADS = CONSUMERS * 128 + PRODUCER_WARPS * 32;
constexpr bool BIG = MI * BN / 2 > 176;  // of the 168 registers that each of 384 threads enters with, consumers take over
constexpr int PRODUCER_REGISTERS = BIG ? 24 : 40, CONSUMER_REGISTERS = BIG ? 240 : 232;
constexpr int A_ROWS = BM / CLUSTER_N;  // rows of A that this CTA fetches for its row of the cluster
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int C_COLS = BN % 64 == 0 ? 64 : BN % 32 == 0 ? 32 : 16;  // a piece of C: 16 rows x C_COLS, swizzled over its row
constexpr int PIECE_BYTES = 16 * C_COLS * 2, ROW_PIECES = BN / C_COLS, PIECES = MI * ROW_PIECES;
constexpr int BUFFERED = PIECES / C_SPLIT;             // pieces in a warp's staging buffer
constexpr int ROUND = C_SPLIT == 1 ? PIECES : 1;       // pieces written before they are sent off together
constexpr int C_BYTES = CONSUMERS * 4 * BUFFERED * PIECE_BYTES;
constexpr int BUDGET = CTAS == 1 ? 232448 : 115712;    // shared memory of one CTA with CTAS of them on an SM
constexpr int FIT = (BUDGET - C_BYTES - 256) / STAGE_BYTES, STAGES = FIT < 8 ? FIT : 8;
constexpr int C_OFFSET = STAGES * STAGE_BYTES, BARRIER_OFFSET = C_OFFSET + C_BYTES;
constexpr int SMEM_BYTES = BARRIER_OFFSET + (2 * STAGES + 2) * 8;
static_assert(STAGES >= 2 && SMEM_BYTES <= BUDGET, "no room for two stages");
static_assert(WG_ROWS % 64 == 0 && BM % SHARE == 0 && BN % (B_NK ? 16 : 64) == 0, "tile and warpgroups do not match");
static_assert((!PINGPONG || CONSUMERS == 2) && PIECES % C_SPLIT == 0 && CLUSTER_N <= 2, "knobs do not match");

// Where a thread stands in the ring: the producer starts with parity 1, which a fresh barrier answers at once.
struct Ring {
  int stage;
  u32 parity;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void skip(int steps) {
    stage += steps % STAGES;
    parity ^= (steps / STAGES) & 1;
    if (stage >= STAGES) stage -= STAGES, parity ^= 1;
  }
};

struct Barriers {
  u32 full, empty, turn;
};

// Tile order: strips `group` tiles wide along M (along N where along_n), each walked across the other dimension. The
// reciprocals are floor(2^61 / d) + 1: exact as long as t * d < 2^61.
struct Raster {
  int tiles, strip_tiles, group, full_strips, last_group, along_n;
  u64 inv_strip, inv_group, inv_last;

  static __device__ __forceinline__ int quotient(int t, u64 inverse) { return (int)__umul64hi((u64)(u32)t << 3, inverse); }

  __device__ __forceinline__ void decode(int t, int& m, int& n) const {
    const int strip = quotient(t, inv_strip), r = t - strip * strip_tiles;
    const bool whole = strip < full_strips;
    const int slow = quotient(r, whole ? inv_group : inv_last);
    const int fast = strip * group + r - slow * (whole ? group : last_group);
    m = along_n ? slow : fast;
    n = along_n ? fast : slow;
  }
};

struct Cta {
  u32 smem, rank_m, rank_n;
  int first, stride;  // in tiles of a cluster
  int rows;           // M, with RAGGED
  Barriers bar;

  __device__ __forceinline__ int row(int tile_m) const {
    const int whole = (tile_m * CLUSTER_M + (int)rank_m) * BM;
    return RAGGED ? min(whole, max(rows - BM, 0)) : whole;
  }
  __device__ __forceinline__ int column(int tile_n) const { return (tile_n * CLUSTER_N + (int)rank_n) * BN; }
};

template <bool MULTICAST>
DEVICE void load(u32 dst, const TensorMap* map, int x, int y, u32 bar, u32 mask) {
  if constexpr (MULTICAST) tma_load_multicast(dst, map, x, y, bar, mask);
  else tma_load(dst, map, x, y, bar);
}

DEVICE void produce(const TensorMap* map_a, const TensorMap* map_b, int k_blocks, const Raster& raster, const Cta& cta) {
  const u32 row_mask = (CLUSTER_N > 1 ? 1 | 1 << CLUSTER_M : 1) << cta.rank_m;         // CTAs with our rows of A
  const u32 column_mask = ((1 << CLUSTER_M) - 1) << (cta.rank_n * CLUSTER_M);          // CTAs with our columns of B
  const u32 arriving = RAGGED ? min(BM, cta.rows) * (BK * 2) + B_BYTES : STAGE_BYTES;
  Ring ring{0, 1};
  for (int t = cta.first; t < raster.tiles; t += cta.stride) {
    int tile_m, tile_n;
    raster.decode(t, tile_m, tile_n);
    const int m0 = cta.row(tile_m) + cta.rank_n * A_ROWS, n0 = cta.column(tile_n);
#pragma unroll 1
    for (int kb = 0; kb < k_blocks; kb++) {
      const u32 bar = cta.bar.full + 8 * ring.stage, a = cta.smem + ring.stage * STAGE_BYTES, b = a + A_BYTES;
      const int k0 = kb * BK;
      mbar_wait(cta.bar.empty + 8 * ring.stage, ring.parity);
      mbar_expect(bar, arriving);
      load<(CLUSTER_N > 1)>(a + cta.rank_n * (A_ROWS * BK * 2), map_a, k0, m0, bar, row_mask);
      if constexpr (B_NK) {
        constexpr int ROWS = BN / CLUSTER_M;
        load<(CLUSTER_M > 1)>(b + cta.rank_m * (ROWS * BK * 2), map_b, k0, n0 + cta.rank_m * ROWS, bar, column_mask);
      } else {
        constexpr int ROWS = BK / CLUSTER_M;  // blocks of 64 columns, each 64 rows of K
#pragma unroll
        for (int j = 0; j < BN / 64; j++)
          load<(CLUSTER_M > 1)>(b + j * (64 * BK * 2) + cta.rank_m * (64 * ROWS * 2), map_b, n0 + j * 64,
                                k0 + cta.rank_m * ROWS, bar, column_mask);
      }
      ring.next();
    }
  }
  if constexpr (CLUSTER > 1)  // a CTA may not leave while others still have stages of it to release
    for (int i = 0; i < STAGES; i++) {
      mbar_wait(cta.bar.empty + 8 * ring.stage, ring.parity);
      ring.next();
    }
}

// Every consumer warp tells each producer that writes into this stage: those of its row and column of the cluster.
DEVICE void release(const Cta& cta, int stage, u32 lane) {
  const u32 bar = cta.bar.empty + 8 * stage;
  if constexpr (CLUSTER == 1) {
    if (lane == 0) mbar_arrive(bar);
  } else {
    if (lane < CLUSTER && (lane % CLUSTER_M == cta.rank_m || lane / CLUSTER_M == cta.rank_n)) mbar_arrive_remote(bar, lane);
  }
}

// One warp's 16 rows of each m64 block: x, y are the column and row of its first element in C.
DEVICE void store_tile(const float (&acc)[MI][BN / 2], const TensorMap* map_c, u32 buffer, int x, int y, u32 lane, int evict) {
  const u32 row = lane % 16, swizzle = row * C_COLS / 64 & (C_COLS / 8 - 1);
  const u64 policy = evict ? l2_evict_first() : l2_evict_normal();
#pragma unroll
  for (int first = 0; first < PIECES; first += ROUND) {
    if (lane == 0) tma_store_wait_read<BUFFERED / ROUND - 1>();  // the buffer is a ring: its oldest round has been read
    __syncwarp();
#pragma unroll
    for (int q = first; q < first + ROUND; q++) {
      const u32 to = buffer + q % BUFFERED * PIECE_BYTES + row * (C_COLS * 2);
#pragma unroll
      for (int j = 0; j < C_COLS / 16; j++) {
        const float* d = &acc[q / ROW_PIECES][q % ROW_PIECES * (C_COLS / 2) + j * 8];
        stmatrix4(to + (((j * 2 + lane / 16) ^ swizzle) << 4), pack_half2(d[0], d[1]), pack_half2(d[2], d[3]),
                  pack_half2(d[4], d[5]), pack_half2(d[6], d[7]));
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int q = first; q < first + ROUND; q++)
        tma_store(map_c, buffer + q % BUFFERED * PIECE_BYTES, x + q % ROW_PIECES * C_COLS, y + q / ROW_PIECES * 64, policy);
      tma_store_commit();
    }
  }
}

DEVICE void consume(const TensorMap* map_c, int k_blocks, const Raster& raster, const Cta& cta, int evict, u32 warp, u32 lane) {
  const u32 wg = warp / 4, wg_row = PINGPONG ? 0 : wg * WG_ROWS;
  const u32 buffer = cta.smem + C_OFFSET + warp * (BUFFERED * PIECE_BYTES);
  const u64 desc_a = matrix_desc(cta.smem + wg_row * (BK * 2), 16, 1024);
  const u64 desc_b = matrix_desc(cta.smem + A_BYTES, B_NK ? 16 : 64 * BK * 2, 1024);
  constexpr int STEP_B = B_NK ? 2 : 128;  // 16 along K, in units of 16 bytes: 32 bytes, or 16 rows of 128 bytes
  float acc[MI][BN / 2];
  Ring ring{0, 0};
  u32 turn_parity = wg == 0;  // warpgroup 0 enters at once
  if (PINGPONG && wg == 1) ring.skip(k_blocks);

  const int stride = PINGPONG ? 2 * cta.stride : cta.stride;
  for (int t = cta.first + (PINGPONG && wg == 1 ? cta.stride : 0); t < raster.tiles; t += stride) {
    if constexpr (PINGPONG) {
      mbar_wait(cta.bar.turn + 8 * wg, turn_parity);
      turn_parity ^= 1;
    }
    int last = 0;
#pragma unroll 1
    for (int kb = 0; kb < k_blocks; kb++) {
      mbar_wait(cta.bar.full + 8 * ring.stage, ring.parity);
      const u64 a = desc_a + ring.stage * (STAGE_BYTES >> 4), b = desc_b + ring.stage * (STAGE_BYTES >> 4);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BK / 16; k++)
#pragma unroll
        for (int i = 0; i < MI; i++) Wgmma<BN>::template mma<!B_NK>(acc[i], a + i * 512 + k * 2, b + k * STEP_B, kb | k);
      wgmma_commit();
      wgmma_wait<1>();  // the batch before this one is done
      if (kb > 0) release(cta, last, lane);
      last = ring.stage;
      ring.next();
    }
    if constexpr (PINGPONG) {
      if (lane == 0) mbar_arrive(cta.bar.turn + 8 * (1 - wg));
      ring.skip(k_blocks);  // past the other warpgroup's tile
    }
    int tile_m, tile_n;
    raster.decode(t, tile_m, tile_n);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
      for (int j = 0; j < BN / 2; j++) asm volatile("" : "+f"(acc[i][j])::"memory");  // not read before this point
    release(cta, last, lane);
    store_tile(acc, map_c, buffer, cta.column(tile_n), cta.row(tile_m) + wg_row + warp % 4 * 16, lane, evict);
  }
  tma_store_wait_read<0>();  // shared memory must outlive the stores that read it
}

// hints: C is the first to leave L2 (bit 0); above it M, with RAGGED.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    hgemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
          const __grid_constant__ TensorMap map_c, int k_blocks, int hints, int tiles, int strip_tiles, int group,
          int full_strips, int last_group, int along_n, u64 inv_strip, u64 inv_group, u64 inv_last) {
  extern __shared__ __align__(1024) char shared[];
  const Raster raster{tiles, strip_tiles, group, full_strips, last_group, along_n, inv_strip, inv_group, inv_last};
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  const u32 smem = smem_addr(shared), barriers = smem + BARRIER_OFFSET;
  const int evict = RAGGED ? hints & 1 : hints, rows = RAGGED ? hints >> 1 : 0;
  const Cta cta{smem, rank % CLUSTER_M, rank / CLUSTER_M, (int)blockIdx.x / CLUSTER, (int)gridDim.x / CLUSTER, rows,
                {barriers, barriers + 8 * STAGES, barriers + 16 * STAGES}};

  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      mbar_init(cta.bar.full + 8 * s, 1);
      mbar_init(cta.bar.empty + 8 * s, 4 * SHARE * (CLUSTER_M + CLUSTER_N - 1));
    }
    mbar_init(cta.bar.turn, 4);
    mbar_init(cta.bar.turn + 8, 4);
    fence_mbar_init();
  }
  if (threadIdx.x == 32) prefetch_map(&map_a);
  if (threadIdx.x == 64) prefetch_map(&map_b);
  if (threadIdx.x == 96) prefetch_map(&map_c);
  __syncthreads();
  if constexpr (CLUSTER > 1) cluster_sync();

  if (warp >= CONSUMERS * 4) {
    if constexpr (PRODUCER_WARPS == 4) registers_shrink<PRODUCER_REGISTERS>();
    if (warp == CONSUMERS * 4 && lane == 0) produce(&map_a, &map_b, k_blocks, raster, cta);
    __syncwarp();
  } else {
    if constexpr (PRODUCER_WARPS == 4) registers_grow<CONSUMER_REGISTERS>();
    consume(&map_c, k_blocks, raster, cta, evict, warp, lane);
  }
}
