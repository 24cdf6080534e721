// Product of bf16 rows and bf16 weights by mma.sync, for every alignment.
//
// Grid    x: tiles of kBM outputs x kBN rows, rows first, so that neighbours share weights in L2,
//         times the blocks of a cluster, which share the runs of a tile (product.cuh); y: groups.
// Tiling  steps of 64 inputs, kStages of them in shared memory, filled by asynchronous copies that
//         all threads issue; a warp multiplies 16 * kMT outputs by 8 * kNT rows. The kernel begins
//         early.
// Smem    the stages; in the same place the block's sums, which its cluster reads.
// Reads   weights once per kBN rows, x once per kBM outputs (from L2).
// Floor   the weights' bytes: 7168 -> 18432 is 264 MB, 60 us at 4.4 TB/s (H200).
// Needs   nothing: where rows or weights are not made of 16-byte vectors, elements are loaded.
#include "../early.cuh"
#include "linear.cuh"
#include "mma_stage.cuh"

namespace kdtree::cuda {
namespace {

template <int kBM_, int kBN_, int kMT_, int kNT_, int kStages_>
struct MmaTile {
  static constexpr int kBM = kBM_, kBN = kBN_, kMT = kMT_, kNT = kNT_, kStages = kStages_;
  static constexpr int kLevels = kMostLevels;
  static constexpr int kWarpsM = kBM / (16 * kMT);
  static constexpr int kThreads = kWarpsM * kBN / (8 * kNT) * kWarp;
  static constexpr int kStage = (kBM + kBN) * kLine, kAll = kStages * kStage;
  static constexpr int kSmem = kAll > kSumsBytes<kBM, kBN> ? kAll : kSumsBytes<kBM, kBN>;
};

template <class Tile, bool kVectors>
__global__ void __launch_bounds__(Tile::kThreads)
    linear_mma_kernel(const __grid_constant__ Product p) {
  constexpr int kBM = Tile::kBM, kBN = Tile::kBN, kStages = Tile::kStages;
  extern __shared__ __align__(16) char smem[];
  wait_for_previous();
  const int tile = blockIdx.x / cluster_blocks(), warp = threadIdx.x / kWarp;
  const int t0 = tile % p.n_tiles * kBN, o0 = tile / p.n_tiles * kBM;
  const int64_t g = blockIdx.y;
  const int begin = cluster_rank() * p.runs * p.run, end = min(p.I, begin + p.runs * p.run);
  const int steps = ceil_div(max(end - begin, 0), kStep), run_steps = p.run / kStep;
  const Bf16* w = static_cast<const Bf16*>(p.w) + (g * p.O + o0) * p.I;
  const Bf16* x = p.x + t0 * p.x_row + g * p.x_group;

  int fill = 0, use = 0;  // the stages to fill and to multiply next
  const auto load = [&](int step) {
    if (step < steps) {
      char* to = smem + fill * Tile::kStage;
      const int i = begin + step * kStep;
      load_rows<kVectors, kBM, Tile::kThreads>(to, w, p.I, p.O - o0, i, p.I);
      load_rows<kVectors, kBN, Tile::kThreads>(to + kBM * kLine, x, p.x_row, p.T - t0, i, p.I);
    }
    copy_commit();
    fill = fill + 1 == kStages ? 0 : fill + 1;
  };
  const int o = warp % Tile::kWarpsM * 16 * Tile::kMT, row = warp / Tile::kWarpsM * 8 * Tile::kNT;
  const uint32_t weights = shared_address(smem) + o * kLine;
  const uint32_t rows = shared_address(smem) + (kBM + row) * kLine;

  Sums<Tile::kMT, Tile::kNT> sum;
  RunSums<Tile::kLevels, Tile::kMT, Tile::kNT> runs;
  for (int s = 0; s < kStages - 1; ++s) load(s);
  for (int run = 0, s = 0; run < p.runs; ++run) {
    clear(sum);
    for (const int last = min(steps, (run + 1) * run_steps); s < last; ++s) {
      copy_wait<kStages - 2>();
      __syncthreads();  // everybody's copies are here, and the stage to fill has been read
      load(s + kStages - 1);
      multiply(weights + use * Tile::kStage, rows + use * Tile::kStage, sum);
      use = use + 1 == kStages ? 0 : use + 1;
    }
    runs.add(run, sum);
  }
  copy_wait<0>();
  let_next_begin();
  __syncthreads();
  float* sums = reinterpret_cast<float*>(smem);
  store_sums<kBM, 16>(sum, sums, o, row);
  store_tile<kBM, kBN, Tile::kThreads>(p, sums, g, t0, o0);
}

template <class Tile>
void launch_tile(Product p, int cluster, Stream stream) {
  const Division d = divide<Tile>(p, cluster);
  const Grid grid{.blocks = dim3(d.blocks, p.G),
                  .threads = Tile::kThreads,
                  .smem = smem_up_to<Tile::kSmem>(),
                  .cluster = d.cluster,
                  .early = true};
  dispatch(in_vectors(p), [&](auto v) { launch(linear_mma_kernel<Tile, v>, grid, stream, p); });
}

// Wide tiles where they are enough for every SM, else narrow ones.
template <class Wide, class Narrow>
void launch_wide_or_narrow(const Product& p, Stream stream) {
  const int enough = processors() + processors() / 4;
  const int cluster = cluster_for<Wide>(p, enough), most = runs_of(p.I, p.O).count;
  if (cluster <= most) return launch_tile<Wide>(p, cluster, stream);
  launch_tile<Narrow>(p, most, stream);
}

}  // namespace

void linear_mma(const Product& p, Stream stream) {
  if (p.T <= 8)
    launch_wide_or_narrow<MmaTile<64, 8, 1, 1, 5>, MmaTile<32, 8, 1, 1, 6>>(p, stream);
  else if (p.T <= 16)
    launch_wide_or_narrow<MmaTile<64, 16, 1, 2, 5>, MmaTile<32, 16, 1, 2, 6>>(p, stream);
  else
    launch_wide_or_narrow<MmaTile<64, 64, 2, 4, 6>, MmaTile<64, 32, 1, 4, 5>>(p, stream);
}

}  // namespace kdtree::cuda
