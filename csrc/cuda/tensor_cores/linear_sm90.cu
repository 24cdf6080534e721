// Product of bf16 rows and bf16 weights by wgmma, for sm_90a and 16-byte rows.
//
// Grid    as many clusters of blocks as are resident at once, or fewer; each takes tiles of kBM outputs
//         x kBN rows of a group in turn, rows first, so that neighbours share weights in L2; the blocks
//         of a cluster share the runs of a tile (product.cuh).
// Tiling  steps of 64 inputs, kStages of them in shared memory, brought by the copy engine at one
//         warp's command, on from tile to tile; each warpgroup multiplies 64 outputs by kBN rows.
// Smem    the stages, the block's sums, which its cluster reads while the next tile's stages come,
//         and the barriers of both.
// Reads   weights once per kBN rows, x once per kBM outputs (from L2): at 64 rows and 192 outputs
//         a third of the weights' bytes.
// Floor   the weights' bytes up to some 200 rows, then flops: 7168 -> 18432 by 2048 rows is 541e9,
//         773 us at 700e12 a second.
// Needs   x and w on 16 bytes, as their rows.
#include "linear.cuh"
#include "meeting.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace kdtree::cuda {
namespace {

inline constexpr int kBoxInputs = 64;            // of a step
inline constexpr int kBoxLine = 2 * kBoxInputs;  // bytes
inline constexpr int kGroupThreads = 4 * kWarp;  // of a warpgroup

template <int kBM_, int kBN_, int kStages_, int kBlocks_, int kLevels_ = 1>
struct WgmmaTile {
  static constexpr int kBM = kBM_, kBN = kBN_, kNT = kBN / 8;
  static constexpr int kStages = kStages_;
  static constexpr int kLevels = kLevels_;
  static constexpr int kBlocks = kBlocks_;  // of an SM
  static constexpr int kReaders = kBM / 64 * kGroupThreads, kThreads = kReaders + kWarp;
  static constexpr int kStage = (kBM + kBN) * kBoxLine;
  static constexpr int kSums = kStages * kStage, kBarriers = kSums + kSumsBytes<kBM, kBN>;
  static constexpr int kMeeting = kBarriers + Ring<kStages>::kBytes;
  static constexpr int kSmem = kMeeting + Meeting::kBytes;
};

struct TensorProduct {
  CUtensorMap w, x;  // [G, O, I], [G, T, I]
  Product p;
  int tiles;
};

// The tiles of a cluster: calls f(group, first row, first output) of each.
template <class Tile, class F>
__device__ inline void each_tile(const TensorProduct& job, F&& f) {
  const int blocks = cluster_blocks(), n = job.p.n_tiles, of_group = job.tiles / job.p.G;
  for (int tile = blockIdx.x / blocks; tile < job.tiles; tile += gridDim.x / blocks) {
    const int g = tile / of_group, i = tile % of_group;
    f(g, i % n * Tile::kBN, i / n * Tile::kBM);
  }
}

// The inputs of a block.
struct Inputs {
  int begin, steps;
  __device__ explicit Inputs(const Product& p) : begin(cluster_rank() * p.runs * p.run) {
    steps = ceil_div(max(min(p.I - begin, p.runs * p.run), 0), kBoxInputs);
  }
};

// The warp that fills the ring: one lane commands.
template <class Tile>
__device__ inline void fill_boxes(const TensorProduct& job, Ring<Tile::kStages> ring,
                                  uint32_t smem) {
  if (threadIdx.x % kWarp != 0) return;
  const Inputs inputs(job.p);
  tensor_ready(job.w), tensor_ready(job.x);
  each_tile<Tile>(job, [&](int g, int t0, int o0) {
#pragma unroll 1
    for (int s = 0; s < inputs.steps; ++s, ring.next()) {
      ring.wait_empty();
      ring.expect(Tile::kStage);
      const uint32_t to = smem + ring.slot * Tile::kStage;
      const int i = inputs.begin + s * kBoxInputs;
      tensor_copy(to, job.w, i, o0, g, ring.full());
      tensor_copy(to + Tile::kBM * kBoxLine, job.x, i, t0, g, ring.full());
    }
  });
}

// The warpgroups that empty it: sum = the sum of the next steps.
template <class Tile>
__device__ inline void multiply_boxes(Ring<Tile::kStages>& ring, uint32_t smem, int steps,
                                      Sums<1, Tile::kNT>& sum) {
  const uint32_t weights = smem + threadIdx.x / kGroupThreads * 64 * kBoxLine;
  const uint32_t rows = smem + Tile::kBM * kBoxLine;
  uint32_t last = 0;  // the stage that is being multiplied
  clear(sum);
#pragma unroll 1
  for (int s = 0; s < steps; ++s, ring.next()) {
    ring.wait_full();
    const uint32_t at = ring.slot * Tile::kStage;
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kBoxLine; i += 32)
      wgmma(sum[0], wgmma_operand(weights + at + i), wgmma_operand(rows + at + i));
    wgmma_commit();
    wgmma_wait<1>();
    if (last && threadIdx.x % kWarp == 0) Barrier::arrive(last);
    last = ring.empty();
  }
  wgmma_wait<0>();
  if (last && threadIdx.x % kWarp == 0) Barrier::arrive(last);
}

// Of all warps but the one that fills. The meeting orders as much; that it does is seen by tools that
// know barriers of a block alone.
template <class Tile>
__device__ inline void readers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(Tile::kReaders) : "memory");
}

template <int kNT>
__device__ inline void copy(const Sums<1, kNT>& from, Sums<1, kNT>& to) {
#pragma unroll
  for (int n = 0; n < kNT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[0][n][i] = from[0][n][i];
}
template <int kNT>
__device__ inline void add(const Sums<1, kNT>& before, Sums<1, kNT>& to) {
#pragma unroll
  for (int n = 0; n < kNT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[0][n][i] = before[0][n][i] + to[0][n][i];
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    linear_sm90_kernel(const __grid_constant__ TensorProduct job) {
  constexpr int kBM = Tile::kBM, kBN = Tile::kBN;
  extern __shared__ __align__(1024) char boxes[];
  const Product& p = job.p;
  const uint32_t smem = shared_address(boxes);
  Ring<Tile::kStages> ring{smem + Tile::kBarriers};
  Meeting meeting{smem + Tile::kMeeting};
  if (threadIdx.x == 0) {
    ring.init(Tile::kReaders / kWarp);
    meeting.init(cluster_blocks() * Tile::kReaders / kWarp);
  }
  __syncthreads();
  // The warp that fills need not wait for other blocks. A block alone is none: its wait would be the
  // block's barrier.
  const bool alone = cluster_blocks() == 1;
  if (!alone) cluster_arrive();
  if (threadIdx.x >= Tile::kReaders) return fill_boxes<Tile>(job, ring, smem);
  if (!alone) cluster_wait();  // all barriers are there
  const int o = threadIdx.x / kWarp * 16, steps = Inputs(p).steps, run_steps = p.run / kBoxInputs;
  float* sums = reinterpret_cast<float*>(boxes + Tile::kSums);
  each_tile<Tile>(job, [&](int g, int t0, int o0) {
    Sums<1, Tile::kNT> sum;
    int left = steps;
    const auto next_run = [&] {
      const int n = min(left, run_steps);
      multiply_boxes<Tile>(ring, smem, n, sum);
      left -= n;
    };
    for (int run = 0; run < p.runs;) {
      next_run();
      ++run;
      if constexpr (Tile::kLevels == 2) {
        if (run < p.runs) {
          Sums<1, Tile::kNT> before;
          copy(sum, before);
          next_run();
          add(before, sum);
          ++run;
        }
      }
      if (run <= Tile::kLevels) {
        meeting.wait_left();  // the sums of the tile before have been read
        readers_sync<Tile>();
        store_sums<kBM, 64>(sum, sums, o, 0);
      } else {
        store_sums<kBM, 64, true>(sum, sums, o, 0);
      }
    }
    readers_sync<Tile>();
    meeting.arrive_and_wait();
    add_sums<kBM, kBN, Tile::kReaders>(p, sums, g, t0, o0, [&] { meeting.leave(); });
  });
  meeting.wait_left();  // nobody ends while its sums are being read
}

// The clusters of a size that are resident at once.
template <class Tile>
int resident(int cluster) {
  static std::mutex mutex;
  static std::map<std::pair<int, int>, int> known;  // by device and size
  int device;
  check(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  int& count = known[{device, cluster}];
  if (!count) {
    const auto kernel = linear_sm90_kernel<Tile>;
    dynamic_smem(reinterpret_cast<const void*>(kernel));
    cudaLaunchAttribute size{.id = cudaLaunchAttributeClusterDimension};
    size.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = cluster, config.blockDim = Tile::kThreads;
    config.dynamicSmemBytes = Tile::kSmem;
    config.attrs = &size, config.numAttrs = 1;
    check(cudaOccupancyMaxActiveClusters(&count, kernel, &config));
    count = max(count, 1);
  }
  return count;
}

template <class Tile>
bool launch_tile(Product p, int cluster, Stream stream) {
  const Division d = divide<Tile>(p, cluster);
  const uint64_t rows = p.T, row = sizeof(Bf16) * (p.T > 1 ? p.x_row : p.I);
  const uint64_t I = p.I, O = p.O, G = p.G, group = sizeof(Bf16) * (p.G > 1 ? p.x_group : p.I);
  TensorProduct job{.p = p, .tiles = static_cast<int>(d.blocks / d.cluster) * p.G};
  if (!describe(job.w, {.at = p.w,
                        .sizes = {I, O, G},
                        .strides = {I * sizeof(Bf16), O * I * sizeof(Bf16)},
                        .box = {kBoxInputs, Tile::kBM, 1},
                        .swizzle = CU_TENSOR_MAP_SWIZZLE_128B}) ||
      !describe(job.x, {.at = p.x,
                        .sizes = {I, rows, G},
                        .strides = {row, group},
                        .box = {kBoxInputs, Tile::kBN, 1},
                        .swizzle = CU_TENSOR_MAP_SWIZZLE_128B}))
    return false;
  const int clusters = min(job.tiles, resident<Tile>(d.cluster));
  const Grid grid{static_cast<unsigned>(clusters * d.cluster), Tile::kThreads,
                  smem_up_to<Tile::kSmem, kSmemSm90>(), d.cluster};
  launch(linear_sm90_kernel<Tile>, grid, stream, job);
  return true;
}

// With a cluster that makes a wave and a quarter, where the runs suffice.
template <class Tile>
bool launch_filling(const Product& p, Stream stream) {
  return launch_tile<Tile>(p, cluster_for<Tile>(p, processors() + processors() / 4), stream);
}

// Up to 64 rows. What counts is that all blocks have their tile at once, and then that few read x.
bool launch_few_rows(const Product& p, Stream stream) {
  using Small = WgmmaTile<64, 64, 5, 2>;
  using Middle = WgmmaTile<128, 64, 3, 2>;
  using Large = WgmmaTile<192, 64, 5, 1, 2>;
  const int all = processors();
  const auto blocks = [&](int outputs) { return int64_t{ceil_div(p.O, outputs)} * p.G; };
  const int64_t large = blocks(Large::kBM), small = blocks(Small::kBM);
  for (int cluster = 1; cluster <= min(2, runs_of(p.I, p.O).count); cluster *= 2)
    if (const int64_t n = large * cluster; n <= all && 10 * n >= 7 * all)
      return launch_tile<Large>(p, cluster, stream);
  if (small >= 8 * all) return launch_tile<Large>(p, 1, stream);
  if (small > Small::kBlocks * all) return launch_filling<Middle>(p, stream);
  return launch_filling<Small>(p, stream);
}

}  // namespace

bool linear_sm90(const Product& p, Stream stream) {
  if (p.T <= 32) return launch_filling<WgmmaTile<64, 32, 5, 3>>(p, stream);
  if (p.T <= 64) return linear_rows_sm90(p, stream) || launch_few_rows(p, stream);
  return launch_filling<WgmmaTile<128, 128, 5, 1>>(p, stream);
}

}  // namespace kdtree::cuda
