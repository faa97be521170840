// What it puts after the source: operands, an emulated launch, and the checks.
static std::vector<signed char> operand_a, operand_b;  // rows of A and columns of B, K contiguous; -1, 0 or 1

// Of one row of A and one column of B, over [k0, k1); outside the matrices are zeros.
__attribute__((no_sanitize("address", "undefined"), optimize("O3"))) static int dot(unsigned m, unsigned n, unsigned k0, unsigned k1) {
  if (m >= M_ || n >= N_) return 0;
  const signed char *a = &operand_a[size_t(m) * K_], *b = &operand_b[size_t(n) * K_];
  int sum = 0;
  for (unsigned k = k0; k < std::min(k1, K_); k++) sum += a[k] * b[k];
  return sum;
}

static unsigned tile_m() { return RASTER_BLOCK ? blockIdx.y : blockIdx.x; }
static unsigned tile_n() { return RASTER_BLOCK ? blockIdx.x : blockIdx.y; }

static float expected(unsigned i) {  // accumulator i of this thread: the sum over the steps that this CTA has loaded
  const unsigned row = tile_m() * BM + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i % 4 / 2 * 8;
  const unsigned column = tile_n() * BN + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
  int sum = 0;
  for (auto [k, m] : loaded_a) sum += dot(row, column, k, k + 64);
  return float(sum);
}

// A step of 16 along K for lane 0, from what lies in the ring where the descriptors point.
static void on_mma(float* d, unsigned long long a, unsigned long long b) {
  const unsigned at_a = (a & 0x3fff) * 16, at_b = (b & 0x3fff) * 16, warp = threadIdx.x / 32 % 4;
  const auto [k_a, m0] = read_box(at_a);
  const unsigned in_a = at_a - box_of(at_a), k = k_a + in_a % 128 / 2, m = m0 + in_a / 128 + warp * 16;
  for (unsigned c = 0; c < BN / 8; c++) {
    const unsigned block = B_NK ? 0 : c / 8 * BK * 128;  // 64 columns
    const auto [k_b, n0] = read_box(at_b + block);
    const unsigned in_b = at_b + block - box_of(at_b + block);
    CHECK(k == k_b + (B_NK ? in_b % 128 / 2 : in_b / 128) && (B_NK ? in_b / 128 : in_b % 128) == 0);
    const unsigned n = n0 + c * 8 - (B_NK ? 0 : c / 8 * 64);
    CHECK(n == tile_n() * BN + c * 8 && m / BM == tile_m() && m % BM / 16 == threadIdx.x / 32);
    for (unsigned i = 0; i < 4; i++) d[c * 4 + i] += dot(m + i / 2 * 8, n + i % 2, k, k + 16);
  }
}

// After the main loop. In phase 0 lane 0 has its sums; the other lanes, which do not run it, get theirs in phase 1.
static void after_multiply(float* acc) {
  for (unsigned i = 0; i < BN / 2 && phase < 2; i++)
    if (phase == 0) {
      std::lock_guard<std::mutex> guard(lock);
      CHECK(acc[i] == expected(i));
    } else {
      acc[i] = expected(i);
    }
}

int main(int, char** v) {
  M_ = atoi(v[1]), N_ = atoi(v[2]), K_ = atoi(v[3]);
  gridDim = {unsigned(atoi(v[4])), unsigned(atoi(v[5])), unsigned(atoi(v[6]))};
  const unsigned smem = atoi(v[7]), steps = atoi(v[10]), more = atoi(v[11]), state = atoi(v[12]);
  operand_a.resize(size_t(M_) * K_), operand_b.resize(size_t(N_) * K_);
  for (auto* operand : {&operand_a, &operand_b})
    for (signed char& x : *operand) x = rand() % 3 - 1;
  workspace.assign(atoi(v[8]), 0x5a);
  CHECK(unsigned(atoi(v[9])) == state && state <= workspace.size() && smem == SMEM_BYTES);
  std::fill(workspace.begin(), workspace.begin() + state, 0xff);
  TensorMap map_a{{'A'}}, map_b{{'B'}};
  struct Cta { std::vector<unsigned char> shared; std::multiset<std::pair<int, int>> a, b; };
  std::vector<Cta> ctas(gridDim.x * gridDim.y * gridDim.z);
  for (unsigned launch = 0; launch < 2; launch++) {  // the second finds the state as the first left it
    std::vector<short> c(size_t(M_) * N_, 0x7e5a);
    for (phase = 0; phase < 3; phase++)
      for (unsigned i = 0; i < ctas.size(); i++) {
        const unsigned id = (launch + phase) % 2 ? ctas.size() - 1 - i : i;
        blockIdx = {id % gridDim.x, id / gridDim.x % gridDim.y, id / gridDim.x / gridDim.y};
        if (phase == 0) ctas[id].shared.assign(smem, 0), ctas[id].a.clear(), ctas[id].b.clear();
        shared_of_cta.swap(ctas[id].shared), loaded_a.swap(ctas[id].a), loaded_b.swap(ctas[id].b);
        const auto run = [&](unsigned thread) {
          threadIdx.x = thread;
          wgmma_splitk(map_a, map_b, (unsigned short*)c.data(), workspace.data(), M_, N_, steps, more, state);
        };
        if (phase == 0) {
          barriers.clear(), boxes.clear();
          pthread_barrier_init(&all_threads, nullptr, WARPS + 1);
          std::vector<std::thread> warps;
          for (unsigned thread = 0; thread < THREADS; thread += 32) warps.emplace_back(run, thread);
          for (std::thread& warp : warps) warp.join();
        } else {
          for (unsigned thread = 0; thread < CONSUMERS; thread++) run(thread);  // of a warp, lane 0 waits for the others' parts
        }
        shared_of_cta.swap(ctas[id].shared), loaded_a.swap(ctas[id].a), loaded_b.swap(ctas[id].b);
      }
    for (unsigned tile = 0; tile < gridDim.x * gridDim.y; tile++) {  // the splits of a tile have loaded each block of K once
      std::multiset<int> ks, kb;
      for (unsigned z = 0; z < gridDim.z; z++) {
        for (auto [k, m] : ctas[z * gridDim.x * gridDim.y + tile].a) ks.insert(k);
        for (auto [k, n] : ctas[z * gridDim.x * gridDim.y + tile].b) kb.insert(k);
      }
      const unsigned blocks = (K_ + BK - 1) / BK * (BK / 64);
      CHECK(ks.size() == blocks && kb.size() == (B_NK ? blocks : blocks / (BK / 64) * (BN / 64)));
      for (unsigned j = 0; j < blocks; j++) CHECK(ks.count(j * 64) == 1);
    }
    for (unsigned m = 0; m < M_; m++)
      for (unsigned n = 0; n < N_; n++) CHECK(c[size_t(m) * N_ + n] == short(dot(m, n, 0, K_)));
    for (unsigned i = 0; i < state; i++) CHECK(workspace[i] == 0xff);
  }
  puts("ok");
}
