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

// What the loaded steps give for this thread's fragment.
static void multiply_on_host(float* acc) {
  if (phase != 1) return;
  const unsigned row = blockIdx.x * BM + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = blockIdx.y * BN + threadIdx.x % 4 * 2;
  std::set<int> ks;
  for (auto [k, m] : loaded_a) { CHECK(m == int(blockIdx.x * BM)); CHECK(ks.insert(k).second); }
  for (unsigned c = 0; c < BN / 8; c++)
    for (unsigned i = 0; i < 4; i++) {
      int sum = 0;
      for (int k : ks) sum += dot(row + i / 2 * 8, column + c * 8 + i % 2, k, k + 64);
      acc[c * 4 + i] = float(sum);
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
        // Of a warp, lane 0 waits for the others' parts.
        for (threadIdx.x = phase == 0 ? CONSUMERS : 0; threadIdx.x < (phase == 0 ? CONSUMERS + 1 : CONSUMERS); threadIdx.x++)
          wgmma_splitk(map_a, map_b, (unsigned short*)c.data(), workspace.data(), M_, N_, steps, more, state);
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
