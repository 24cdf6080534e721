// Routed experts, INT4 weights and bf16 rows, on tensor cores; many rows an expert.
//
//   The sums of moe_experts_int4.cu, in its order: a row has the same bits in either form.
//
// Grid    plan_kernel: one block, which sorts the pairs by expert. many_kernel: a block a processor;
//         they share the items (group of up to 48 rows of an expert, tile rows at a place).
// Tiling  a block multiplies its rows by eight tile rows, one a warp: of down, or four of the gate and
//         the same four of up. A warp's tile is 32 outputs x 16, 32 or 48 rows; a run of the order
//         ends where `total` takes up `sum`.
// Smem    kStages stages: kDepth tiles of each warp, and the same inputs of all rows (72 KB).
// Reads   an expert's weights once per group of its rows; rows once per 128 or 256 outputs, from L2.
// Floor   6 T K D F flops: at 2048 rows of Kimi K2 (K = 8) 1.44e12, 2.1 ms at 690 TFLOP/s (an H200);
//         the weights of all 384 experts take 2.1 ms as well.
// Needs   packed weights and rows on 16 bytes; scales may start anywhere.
#include "int4_tile.cuh"
#include "moe_experts_int4.cuh"
#include "moe_plan.cuh"

namespace kdtree::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRowTiles = 6;  // of 8 rows, that a block multiplies by: registers hold no more
constexpr int kBlockRows = kRowTiles * kRows;
constexpr int kDepth = 2;  // tiles of a stage
constexpr int kStages = 4;
constexpr int kPlanThreads = 1024;
constexpr int kVector = 8;                             // bf16 of 16 bytes
constexpr int kPitch = kDepth * kInt4Tile + kVector;   // of a row: ldmatrix meets no bank twice
constexpr int kChunks = kDepth * kInt4Tile / kVector;  // of a row
constexpr int kCopyRows = kThreads / kChunks;          // rows that a pass of all threads copies

struct Stage {
  uint4 code[kWarps][kDepth][kWarp];
  bf16 scale[kWarps][kDepth][kInt4Tile];
  bf16 x[ceil_div(kBlockRows, kCopyRows) * kCopyRows][kPitch];
};
union Smem {
  Stage stage[kStages];
  float4 up[kWarps / 2][kRowTiles][2][kWarp];
};

struct PlanParams {
  MoeExpertsParams p;
  int rows;  // of a group, at most
};
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  __shared__ alignas(16) int first[kMoeExperts];
  __shared__ int2 sums[kPlanThreads / kWarp];
  make_plan<kPlanThreads>(p.p, p.rows, first, sums);
}

// What a block multiplies: up to NT * 8 rows, those of a group, by the tile rows at `place`.
template <bool kHidden, int NT>
struct Block {
  static constexpr int kEach = kHidden ? kWarps / 2 : kWarps;  // tile rows, of the gate and of up
  static constexpr int kPasses = ceil_div(NT * kRows, kCopyRows);
  static_assert(NT % 2 == 0 && NT <= kRowTiles);
  using Sums = float[NT][2][4];

  const MoeExpertsParams& p;
  Smem& smem;
  const MoePlan& work;
  const MoeGroup group;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int rows = (kHidden ? p.F : p.D) / kInt4Tile, tiles = (kHidden ? p.D : p.F) / kInt4Tile;
  const int tile_row;
  const bf16* from[kPasses];  // this thread's chunk of the rows that it copies
  const uint4* w;
  const bf16* scale;

  __device__ Block(const MoeExpertsParams& p, Smem& smem, const MoePlan& work,
                   const MoeGroup& group, int place)
      : p(p), smem(smem), work(work), group(group), tile_row(place * kEach + warp % kEach) {
    const int matrix = kHidden ? 2 * group.expert + warp / kEach : group.expert;
    const int64_t first = (int64_t{matrix} * rows + min(tile_row, rows - 1)) * tiles;
    w = static_cast<const uint4*>(kHidden ? p.gate_up : p.down) + first * kWarp + lane;
    scale = static_cast<const bf16*>(kHidden ? p.gate_up_scale : p.down_scale) + first * kInt4Tile;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int pair = pair_of(min(i * kCopyRows + int(threadIdx.x) / kChunks, group.count - 1));
      from[i] = (kHidden ? static_cast<const bf16*>(p.x) + pair / p.K * p.x_stride
                         : static_cast<const bf16*>(p.hidden) + int64_t{pair} * p.F) +
                threadIdx.x % kChunks * kVector;
    }
  }

  __device__ int pair_of(int row) const { return work.pair[group.first + row]; }

  // Begins the copy of a step: kDepth tiles of every warp, and all rows' inputs.
  __device__ void copy(int step) const {
    const int tile = step * kDepth, count = min(kDepth, tiles - tile);
    if (count > 0) {
      Stage& to = smem.stage[step % kStages];
#pragma unroll
      for (int i = 0; i < kDepth; ++i)
        if (i < count) copy_async(&to.code[warp][i][lane], w + (tile + i) * kWarp);
      const bf16* s = scale + tile * kInt4Tile;
      if (reinterpret_cast<uintptr_t>(s) % sizeof(uint4) == 0) {
        if (lane * kVector < count * kInt4Tile)
          copy_async(&to.scale[warp][0][lane * kVector], s + lane * kVector);
      } else {  // scales may start anywhere
        for (int i = lane; i < count * kInt4Tile; i += kWarp) to.scale[warp][0][i] = s[i];
      }
      const int chunk = threadIdx.x % kChunks * kVector;
#pragma unroll
      for (int i = 0; i < kPasses; ++i)
        if (chunk < count * kInt4Tile)
          copy_async(&to.x[i * kCopyRows + threadIdx.x / kChunks][chunk],
                     from[i] + tile * kInt4Tile);
    }
    copy_commit();
  }

  // total += sum, sum = 0
  static __device__ void end_run(Sums& sum, Sums& total) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        total[n][j / 4][j % 4] += sum[n][j / 4][j % 4];
        sum[n][j / 4][j % 4] = 0;
      }
  }

  __device__ void multiply(const Stage& stage, int i, uint32_t scale0, uint32_t scale1,
                           Sums& sum) const {
    const uint32_t x = shared_address(&stage.x[lane % 8][i * kInt4Tile + lane / 8 * kVector]);
    const Int4Tile tile(stage.code[warp][i][lane], scale0, scale1);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {  // two at a time: registers are short
      uint32_t b[2][4];
      load_fragments(x + n * kRows * kPitch * int{sizeof(bf16)}, b[0]);
      load_fragments(x + (n + 1) * kRows * kPitch * int{sizeof(bf16)}, b[1]);
      tile.multiply(b[0], sum[n]);
      tile.multiply(b[1], sum[n + 1]);
    }
  }

  // Sums of the runs, in order; where there is one run alone, in `sum`.
  __device__ void products(Sums& sum, Sums& total) const {
    const int steps = ceil_div(tiles, kDepth);
    const int length = kHidden ? ceil_div(tiles, moe_hidden_runs(p)) : tiles;
    int left = length;  // tiles of this run
    for (int s = 0; s < kStages - 1; ++s) copy(s);
    for (int step = 0; step < steps; ++step) {
      copy_wait<kStages - 2>();
      __syncthreads();  // all copies of the step have come; all have read the step before
      copy(step + kStages - 1);
      const Stage& stage = smem.stage[step % kStages];
      uint32_t scales[4];
      load_scales(shared_address(&stage.scale[warp][0]), scales);
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (step * kDepth + i >= tiles) break;
        multiply(stage, i, scales[2 * i], scales[2 * i + 1], sum);
        if (kHidden && --left == 0) left = length, end_run(sum, total);
      }
    }
    if (kHidden && left < length) end_run(sum, total);
    copy_wait<0>();
    __syncthreads();  // the stages have been read
  }

  __device__ void store_hidden(const Sums& total) const {
    if (warp >= kEach)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m)
          smem.up[warp - kEach][n][m][lane] = {total[n][m][0], total[n][m][1], total[n][m][2],
                                               total[n][m][3]};
    __syncthreads();
    if (warp < kEach && tile_row < rows)
#pragma unroll
      for (int j = 0; j < 2 * NT; ++j) {
        const int r = j / 2 * kRows + lane % 4 * 2 + j % 2;
        if (r >= group.count) continue;
        bf16* to = static_cast<bf16*>(p.hidden) + int64_t{pair_of(r)} * p.F + tile_row * kInt4Tile +
                   lane / 4;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float4 up = smem.up[warp][j / 2][m][lane];
          to[16 * m] = gated(total[j / 2][m][j % 2], j % 2 ? up.y : up.x);
          to[16 * m + 8] = gated(total[j / 2][m][j % 2 + 2], j % 2 ? up.w : up.z);
        }
      }
    __syncthreads();  // up's sums have been read
  }

  __device__ void store_partial(const Sums& sum) const {
    if (tile_row >= rows) return;
#pragma unroll
    for (int j = 0; j < 2 * NT; ++j) {
      const int r = j / 2 * kRows + lane % 4 * 2 + j % 2;
      if (r >= group.count) continue;
      float* to = p.partial + int64_t{pair_of(r)} * p.D + tile_row * kInt4Tile + lane / 4;
#pragma unroll
      for (int q = 0; q < 4; ++q) to[8 * q] = sum[j / 2][q / 2][q % 2 * 2 + j % 2] * kInt4Unit;
    }
  }

  __device__ void run() const {
    float sum[NT][2][4] = {}, total[NT][2][4] = {};
    products(sum, total);
    if constexpr (kHidden)
      store_hidden(total);
    else
      store_partial(sum);
  }
};

template <bool kHidden>
__global__ void __launch_bounds__(kThreads, 1)
    many_kernel(const __grid_constant__ MoeExpertsParams p) {
  extern __shared__ __align__(128) char bytes[];
  auto& smem = *reinterpret_cast<Smem*>(bytes);
  if (!kHidden) wait_for_previous();
  let_next_begin();
  const MoePlan work = made_plan(p);
  const int rows = (kHidden ? p.F : p.D) / kInt4Tile;
  const int places = ceil_div(rows, Block<kHidden, kRowTiles>::kEach);
  for (int item = blockIdx.x; item < work.groups * places; item += gridDim.x) {
    const MoeGroup group = work.group[item / places];
    const int place = item % places;
    if (group.count <= 2 * kRows)
      Block<kHidden, 2>(p, smem, work, group, place).run();
    else if (group.count <= 4 * kRows)
      Block<kHidden, 4>(p, smem, work, group, place).run();
    else
      Block<kHidden, kRowTiles>(p, smem, work, group, place).run();
  }
}

}  // namespace

bool moe_many_fits(const MoeExpertsParams& p) {
  return int64_t{p.T} * p.K >= int64_t{p.E} * kRows && aligned<bf16>(p.x, p.x_stride);
}

void moe_make_plan(const MoeExpertsParams& p, Stream stream, int rows) {
  launch(plan_kernel, {1, kPlanThreads}, stream, PlanParams{p, rows});
}

void moe_products_many(const MoeExpertsParams& p, Stream stream) {
  const auto blocks = static_cast<unsigned>(moe_processors());
  moe_make_plan(p, stream, kBlockRows);
  Grid grid{.blocks = blocks, .threads = kThreads, .smem = smem_up_to<sizeof(Smem)>()};
  launch(many_kernel<true>, grid, stream, p);
  grid.early = true;
  launch(many_kernel<false>, grid, stream, p);
}

}  // namespace kdtree::cuda
