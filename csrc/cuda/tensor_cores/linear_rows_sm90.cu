// Product of up to 64 bf16 rows and bf16 weights by wgmma with the rows as A, for sm_90a.
//
// The same sums as linear_sm90's: what is A and what is B changes no bit. As B a block's weights
// are any multiple of 8 outputs, not of 64, so that one wave of blocks leaves no SM without work.
//
// Grid    x: blocks of kBM outputs and all inputs, two an SM; y: groups.
// Tiling  steps of 64 inputs, kStages of them in shared memory, brought by the copy engine at one
//         warp's command; a warpgroup multiplies 64 rows by kBM outputs.
// Smem    the stages and their barriers.
// Reads   weights once, x once per block (from L2): nine tenths of the weights' bytes.
// Floor   the weights' bytes: 7168 -> 18432 is 264 MB, 60 us at 4.4 TB/s (H200).
// Needs   x and w on 16 bytes, as their rows; at most four runs (product.cuh).
#include "linear.cuh"
#include "ring.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace kdtree::cuda {
namespace {

inline constexpr int kRows = 64, kBM = 72, kNT = kBM / 8;
inline constexpr int kStages = 6, kBlocks = 2;   // of an SM
inline constexpr int kBoxInputs = 64;            // of a step
inline constexpr int kBoxLine = 2 * kBoxInputs;  // bytes
inline constexpr int kReaders = 4 * kWarp, kThreads = kReaders + kWarp;
inline constexpr int kStage = (kRows + kBM) * kBoxLine, kBarriers = kStages * kStage;
inline constexpr int kSmem = kBarriers + Ring<kStages>::kBytes;

struct RowsProduct {
  CUtensorMap w, x;  // [G, O, I], [G, T, I]
  Product p;
};

// Brings the steps from `begin` on to the ring's next stages, by one thread.
__device__ void fill_stages(const RowsProduct& job, Ring<kStages>& ring, uint32_t smem, int begin,
                            int end) {
  const int o0 = blockIdx.x * kBM, g = blockIdx.y;
#pragma unroll 1
  for (int s = begin; s < end; ++s, ring.next()) {
    ring.wait_empty();
    ring.expect(kStage);
    const uint32_t to = smem + ring.slot * kStage;
    tensor_copy(to + kRows * kBoxLine, job.w, s * kBoxInputs, o0, g, ring.full());
    tensor_copy(to, job.x, s * kBoxInputs, 0, g, ring.full());
  }
}

// sum = the sum of the next steps.
__device__ void multiply_boxes(Ring<kStages>& ring, uint32_t smem, int steps,
                               Sums<1, kNT>& sum) {
  uint32_t last = 0;  // the stage that is being multiplied
  clear(sum);
#pragma unroll 1
  for (int s = 0; s < steps; ++s, ring.next()) {
    ring.wait_full();
    const uint32_t rows = smem + ring.slot * kStage, weights = rows + kRows * kBoxLine;
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kBoxLine; i += 32)
      wgmma(sum[0], wgmma_operand(rows + i), wgmma_operand(weights + i));
    wgmma_commit();
    wgmma_wait<1>();
    if (last && threadIdx.x % kWarp == 0) Barrier::arrive(last);
    last = ring.empty();
  }
  wgmma_wait<0>();
  if (last && threadIdx.x % kWarp == 0) Barrier::arrive(last);
}

// A warp's sums are of 16 rows: lane 4 * g + t has rows g and g + 8, outputs 2t and 2t + 1.
__device__ void store_outputs(const Product& p, const Sums<1, kNT>& sum) {
  const int lane = threadIdx.x % kWarp, o = blockIdx.x * kBM + lane % 4 * 2;
  const int t = threadIdx.x / kWarp * 16 + lane / 4;
  const auto put = [&](auto* y) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = t + 8 * half;
      if (row >= p.T) continue;
      auto* to = y + (int64_t{row} * p.G + blockIdx.y) * p.O + o;
#pragma unroll
      for (int n = 0; n < kNT; ++n) {
        const int left = p.O - o - 8 * n;
        const float v[2] = {sum[0][n][2 * half], sum[0][n][2 * half + 1]};
        p.O % 2 == 0 && left >= 2 ? store<true>(to + 8 * n, left, v)
                                  : store<false>(to + 8 * n, left, v);
      }
    }
  };
  p.y_dtype == DType::f32 ? put(static_cast<float*>(p.y)) : put(static_cast<Bf16*>(p.y));
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    linear_rows_sm90_kernel(const __grid_constant__ RowsProduct job) {
  extern __shared__ __align__(1024) char boxes[];
  const Product& p = job.p;
  const uint32_t smem = shared_address(boxes);
  const int steps = ceil_div(p.I, kBoxInputs), run_steps = p.run / kBoxInputs;
  Ring<kStages> ring{smem + kBarriers};
  if (threadIdx.x == kReaders) {  // the first steps need not wait for the block
    ring.init(kReaders / kWarp);
    fill_stages(job, ring, smem, 0, min(steps, kStages));
  } else if (threadIdx.x == 0) {
    tensor_ready(job.w), tensor_ready(job.x);
  }
  __syncthreads();
  if (threadIdx.x >= kReaders) {
    if (threadIdx.x == kReaders) fill_stages(job, ring, smem, kStages, steps);
    return;
  }
  Sums<1, kNT> sum;
  RunSums<kMostLevels, 1, kNT> runs;
  for (int run = 0, left = steps; run < p.runs; ++run, left -= run_steps) {
    multiply_boxes(ring, smem, min(left, run_steps), sum);
    runs.add(run, sum);
  }
  store_outputs(p, sum);
}

}  // namespace

bool linear_rows_sm90(Product p, Stream stream) {
  const Runs runs = runs_of(p.I, p.O);
  const int64_t blocks = int64_t{ceil_div(p.O, kBM)} * p.G, wave = kBlocks * processors();
  const bool fills_a_wave = blocks <= wave && 10 * blocks >= 9 * wave;
  if (p.T > kRows || runs.count > 1 << kMostLevels || !fills_a_wave) return false;
  p.run = runs.length, p.runs = runs.count;
  const uint64_t rows = p.T, row = sizeof(Bf16) * (p.T > 1 ? p.x_row : p.I);
  const uint64_t I = p.I, O = p.O, G = p.G, group = sizeof(Bf16) * (p.G > 1 ? p.x_group : p.I);
  RowsProduct job{.p = p};
  if (!describe(job.w, {.at = p.w,
                        .sizes = {I, O, G},
                        .strides = {I * sizeof(Bf16), O * I * sizeof(Bf16)},
                        .box = {kBoxInputs, kBM, 1},
                        .swizzle = CU_TENSOR_MAP_SWIZZLE_128B}) ||
      !describe(job.x, {.at = p.x,
                        .sizes = {I, rows, G},
                        .strides = {row, group},
                        .box = {kBoxInputs, kRows, 1},
                        .swizzle = CU_TENSOR_MAP_SWIZZLE_128B}))
    return false;
  const Grid grid{{static_cast<unsigned>(ceil_div(p.O, kBM)), static_cast<unsigned>(p.G)},
                  kThreads,
                  smem_up_to<kSmem, kSmemSm90>()};
  launch(linear_rows_sm90_kernel, grid, stream, job);
  return true;
}

}  // namespace kdtree::cuda
