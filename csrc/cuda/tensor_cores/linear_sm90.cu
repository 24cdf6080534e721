// Product of bf16 rows and bf16 weights by wgmma, for sm_90a and 16-byte rows.
//
// Grid    as linear_mma's.
// Tiling  steps of 64 inputs, kStages of them in shared memory, brought by the copy engine at one
//         warp's command; each warpgroup multiplies 64 * kMT outputs by kBN rows.
// Smem    the stages, their barriers; in the same place the block's sums, which its cluster reads.
// Reads   weights once per kBN rows, x once per kBM outputs (from L2): at 64 rows and 128 outputs
//         half of the weights' bytes.
// Floor   the weights' bytes up to some 200 rows, then flops: 7168 -> 18432 by 2048 rows is 541e9,
//         773 us at 700e12 a second.
// Needs   x and w on 16 bytes, as their rows.
#include "linear.cuh"
#include "wgmma.cuh"

namespace kdtree::cuda {
namespace {

inline constexpr int kBoxInputs = 64;            // of a step
inline constexpr int kBoxLine = 2 * kBoxInputs;  // bytes
inline constexpr int kGroupThreads = 4 * kWarp;  // of a warpgroup

template <int kBM_, int kBN_, int kStages_, int kBlocks_, int kLevels_ = kMostLevels>
struct WgmmaTile {
  static constexpr int kBM = kBM_, kBN = kBN_, kMT = 1, kNT = kBN / 8;
  static constexpr int kStages = kStages_, kLevels = kLevels_;
  static constexpr int kBlocks = kBlocks_;  // of an SM
  static constexpr int kReaders = kBM / (64 * kMT) * kGroupThreads, kThreads = kReaders + kWarp;
  static constexpr int kStage = (kBM + kBN) * kBoxLine, kAll = kStages * kStage;
  static constexpr int kBarriers = kAll > kSumsBytes<kBM, kBN> ? kAll : kSumsBytes<kBM, kBN>;
  static constexpr int kSmem = kBarriers + Ring<kStages>::kBytes;
};

struct TensorProduct {
  CUtensorMap w, x;  // [G, O, I], [G, T, I]
  Product p;
};

// The warp that fills the ring: one lane commands.
template <class Tile>
__device__ inline void fill_boxes(const TensorProduct& job, Ring<Tile::kStages> ring, uint32_t smem,
                                  int g, int t0, int o0, int begin, int steps) {
  if (threadIdx.x % kWarp != 0) return;
  for (int s = 0; s < steps; ++s, ring.next()) {
    ring.wait_empty();
    ring.expect(Tile::kStage);
    const uint32_t to = smem + ring.slot * Tile::kStage;
    const int i = begin + s * kBoxInputs;
    tensor_copy(to, job.w, i, o0, g, ring.full());
    tensor_copy(to + Tile::kBM * kBoxLine, job.x, i, t0, g, ring.full());
  }
}

// The warpgroups that empty it: sum = the sum of the block's runs.
template <class Tile>
__device__ inline void multiply_boxes(const Product& p, Ring<Tile::kStages> ring, uint32_t smem,
                                      int steps, Sums<Tile::kMT, Tile::kNT>& sum) {
  const int run_steps = p.run / kBoxInputs;
  const uint32_t weights = smem + threadIdx.x / kGroupThreads * Tile::kMT * 64 * kBoxLine;
  const uint32_t rows = smem + Tile::kBM * kBoxLine;
  RunSums<Tile::kLevels, Tile::kMT, Tile::kNT> runs;
  uint32_t last = 0;  // the stage that is being multiplied
  for (int run = 0, s = 0; run < p.runs; ++run) {
    clear(sum);
    for (const int end = min(steps, (run + 1) * run_steps); s < end; ++s, ring.next()) {
      ring.wait_full();
      const uint32_t at = ring.slot * Tile::kStage;
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < kBoxLine; i += 32)
#pragma unroll
        for (int m = 0; m < Tile::kMT; ++m)
          wgmma(sum[m], wgmma_operand(weights + at + m * 64 * kBoxLine + i),
                wgmma_operand(rows + at + i));
      wgmma_commit();
      wgmma_wait<1>();
      if (last && threadIdx.x % kWarp == 0) ring.arrive(last);
      last = ring.empty();
    }
    wgmma_wait<0>();
    runs.add(run, sum);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    linear_sm90_kernel(const __grid_constant__ TensorProduct job) {
  constexpr int kBM = Tile::kBM, kBN = Tile::kBN;
  extern __shared__ __align__(1024) char boxes[];
  const Product& p = job.p;
  const int tile = blockIdx.x / cluster_blocks(), g = blockIdx.y;
  const int t0 = tile % p.n_tiles * kBN, o0 = tile / p.n_tiles * kBM;
  const int begin = cluster_rank() * p.runs * p.run, end = min(p.I, begin + p.runs * p.run);
  const int steps = ceil_div(max(end - begin, 0), kBoxInputs);
  const uint32_t smem = shared_address(boxes);

  const Ring<Tile::kStages> ring{smem + Tile::kBarriers};
  if (threadIdx.x == 0) ring.init(Tile::kReaders / kWarp);
  __syncthreads();

  Sums<Tile::kMT, Tile::kNT> sum;
  const bool reads = threadIdx.x < Tile::kReaders;
  if (reads)
    multiply_boxes<Tile>(p, ring, smem, steps, sum);
  else
    fill_boxes<Tile>(job, ring, smem, g, t0, o0, begin, steps);
  __syncthreads();  // all stages have been read
  float* sums = reinterpret_cast<float*>(boxes);
  const int warp = threadIdx.x / kWarp;
  if (reads) store_sums<kBM, 64>(sum, sums, warp / 4 * Tile::kMT * 64 + warp % 4 * 16, 0);
  store_tile<kBM, kBN, Tile::kThreads>(p, sums, g, t0, o0);
}

// The tensor [groups, rows, I] in boxes of a step of box_rows rows; false where its strides are none
// that the copy engine takes.
bool describe(CUtensorMap& map, const void* at, int I, int rows, int groups, int64_t row,
              int64_t group, int box_rows) {
  static const auto encode = [] {
    void* found;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                           cudaEnableDefault, &result));
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  const cuuint64_t sizes[] = {cuuint64_t(I), cuuint64_t(rows), cuuint64_t(groups)};
  const cuuint64_t strides[] = {cuuint64_t(row) * sizeof(Bf16), cuuint64_t(group) * sizeof(Bf16)};
  const cuuint32_t box[] = {kBoxInputs, cuuint32_t(box_rows), 1}, steps[] = {1, 1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(at), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class Tile>
bool launch_tile(Product p, int cluster, Stream stream) {
  const Division d = divide<Tile>(p, cluster);
  const Grid grid{{d.blocks, static_cast<unsigned>(p.G)},
                  Tile::kThreads,
                  smem_up_to<Tile::kSmem, kSmemSm90>(),
                  d.cluster};
  const int64_t x_row = p.T > 1 ? p.x_row : p.I, x_group = p.G > 1 ? p.x_group : p.I;
  TensorProduct job{.p = p};
  if (!describe(job.w, p.w, p.I, p.O, p.G, p.I, int64_t{p.O} * p.I, Tile::kBM) ||
      !describe(job.x, p.x, p.I, p.T, p.G, x_row, x_group, Tile::kBN))
    return false;
  launch(linear_sm90_kernel<Tile>, grid, stream, job);
  return true;
}

// With a cluster that makes a wave and a quarter, where the runs suffice.
template <class Tile>
bool launch_filling(const Product& p, Stream stream) {
  return launch_tile<Tile>(p, cluster_for<Tile>(p, processors() + processors() / 4), stream);
}

}  // namespace

bool linear_sm90(const Product& p, Stream stream) {
  if (p.T <= 32) return launch_filling<WgmmaTile<64, 32, 5, 3>>(p, stream);
  if (p.T > 64) return launch_filling<WgmmaTile<128, 128, 6, 1, 1>>(p, stream);
  // Two of the small tiles fit an SM: where they would leave most of a second wave empty, large ones.
  using Small = WgmmaTile<64, 64, 6, 2>;
  const int64_t tiles = int64_t{ceil_div(p.O, Small::kBM)} * p.G, all = processors();
  if (tiles > 2 * all && tiles < 4 * all)
    return launch_filling<WgmmaTile<128, 64, 8, 1>>(p, stream);
  return launch_filling<Small>(p, stream);
}

}  // namespace kdtree::cuda
