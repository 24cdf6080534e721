// Routed experts, INT4 weights and bf16 rows, on tensor cores; few rows an expert.
//
//   h[t, k] = silu(gate[ids[t, k]] x[t]) * (up[ids[t, k]] x[t]), rounded to bf16
//   y[t] = sum over k in order of weights[t, k] * (down[ids[t, k]] h[t, k]), + shared[t]
//
// Grid    hidden_kernel and down_kernel: as many blocks as there are places, which share the items
//         (group of up to 8 rows of an expert, tile row of 32 outputs) evenly; each block sorts the
//         pairs (t, k) by expert for itself, or where they are many a kernel does so once.
//         down_kernel begins before hidden_kernel has ended: its first weights come while the last
//         of hidden's are multiplied. moe_weighted_sum.cu ends the op.
// Tiling  hidden: the inputs of a tile row of the gate, and of the same of up, are runs of equally many
//         tiles. A block's eight warps take four runs of each, a cluster of blocks the others.
//
//           block 0: gate  | warp 0 | warp 1 | warp 2 | warp 3 |    block 1: the runs 4 .. 7
//                    up    | warp 4 | warp 5 | warp 6 | warp 7 |
//
//         The runs' sums meet in shared memory, each block's share of the outputs in its own. down:
//         a warp multiplies a tile row alone, and no one waits for another.
// Smem    per warp a ring of kStages stages of weights (72 KB), the plan, the runs' sums: 96 KB.
// Reads   a touched expert's weights once per group of its rows (from HBM once), rows from L2.
// Floor   the touched experts' weights: 24.8 MB each for Kimi K2 (D = 7168, F = 2048), so 198 MB at
//         T = 1, K = 8, 44 us at 4.55 TB/s (an H200's read bandwidth). A tile's 1024 codes take about
//         75 instructions of a warp, two thirds of the time that its bytes take.
// Needs   packed weights on 16 bytes; rows and scales may start anywhere; sm_90 or later.
#include "int4_stream.cuh"
#include "moe_experts_int4.cuh"
#include "moe_plan.cuh"

namespace kdtree::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kHalf = kMoeRuns;  // warps of gate, and of up
static_assert(kWarps == 2 * kHalf);
constexpr int kHiddenBlocks = 2;  // a processor
constexpr int kDownBlocks = 2;

struct Smem {
  Int4Stage stage[kWarps][kStages];
  MoeGroup group[kMoePairs];
  int pair[kMoePairs];
  int2 plan[kWarps];
  int first[kMoeExperts];
};
template <int C>
struct HiddenSmem : Smem {
  float exchange[2][2][C * kHalf][kInt4Tile / C][kRows];  // [parity][gate, up][run]
  uint64_t barrier[2];
};

template <class T>
__device__ T& shared_memory() {
  extern __shared__ __align__(128) char bytes[];
  return *reinterpret_cast<T*>(bytes);
}

__device__ float silu(float x) { return x / (1 + expf(-x)); }

__device__ MoePlan plan(const MoeExpertsParams& p, Smem& smem) {
  if (!moe_sorts_itself(p)) return made_plan(p);
  const int groups = make_groups<kThreads>(p, kRows, smem.first, smem.plan, smem.group, smem.pair);
  return {smem.group, smem.pair, groups};
}

// The pair of this lane's B fragments among a group's; beyond the last, the last: it is not stored.
__device__ int lane_pair(const MoePlan& work, const MoeGroup& group) {
  return work.pair[group.first + min(int(threadIdx.x) % kWarp / 4, group.count - 1)];
}

// The B fragments of a tile, from this lane's row at its inputs 2t; kPairs: by 4 bytes, where rows
// stand on those.
template <bool kPairs>
__device__ void load_rows(const bf16* from, uint32_t (&b)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (kPairs) {
      b[j] = load_now(reinterpret_cast<const uint32_t*>(from + 8 * j));
    } else {
      const auto* half = reinterpret_cast<const uint16_t*>(from + 8 * j);
      b[j] = __ldg(half) | uint32_t{__ldg(half + 1)} << 16;
    }
  }
}

// The same of hidden, whose tiles are kept by lanes. It is no load of constants: another kernel may
// have written them since this one began.
__device__ void load_hidden(const bf16* from, uint32_t (&b)[4]) {
  const uint4 v = load_now(reinterpret_cast<const uint4*>(from));
  b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
}

// n / d for n >= 0, given ~0u / d: the quotient by it, rounded down, is at most one too low.
__device__ unsigned divide(unsigned n, unsigned d, unsigned reciprocal) {
  const unsigned q = __umulhi(n, reciprocal);
  return q + (n - q * d >= d);
}

template <int C, bool kPairs>
__global__ void __launch_bounds__(kThreads, kPairs ? 2 : 1)
    hidden_kernel(const __grid_constant__ MoeExpertsParams p) {
  constexpr int kRuns = C * kHalf;      // of an output's inputs
  constexpr int kPart = kInt4Tile / C;  // outputs that a block of a cluster finishes
  constexpr int kRounds = ceil_div(kPart, kWarp / 2);
  auto& smem = shared_memory<HiddenSmem<C>>();
  let_next_begin();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp,
            rank = C > 1 ? cluster_rank() : 0;
  if (C > 1 && threadIdx.x == 0) {
    for (auto& barrier : smem.barrier) barrier_init(shared_address(&barrier));
    barrier_init_fence();
  }
  const MoePlan work = plan(p, smem);
  if (C > 1) cluster_arrive<true>();
  const int rows = p.F / kInt4Tile, tiles = p.D / kInt4Tile, matrix = warp / kHalf;
  const int length = ceil_div(tiles, kRuns), run = rank * kHalf + warp % kHalf;
  const int begin = min(run * length, tiles), count = min(length, tiles - begin);

  const auto first = [&](const Item& item) {
    return ((2 * work.group[item.group].expert + matrix) * rows + item.place) * tiles + begin;
  };
  const Items items(work.groups, rows, gridDim.x / C);
  Item item = items.at(blockIdx.x / C);
  Int4Stream stream(smem.stage[warp], p.gate_up, p.gate_up_scale, count, item, items, first);

  // Half a warp adds the gate's runs, half the up's.
  const int half = lane / (kWarp / 2), sum0 = warp * (kWarp / 2) + lane % (kWarp / 2);
  bf16* out[kRounds] = {};
  const auto finish = [&](const auto& exchange) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int at = min(i * kThreads / 2 + sum0, kPart * kRows - 1);
      float sum = 0;
#pragma unroll
      for (int r = 0; r < kRuns; ++r) sum += exchange[half][r][at % kPart][at / kPart];
      const float up = __shfl_down_sync(~0u, sum, kWarp / 2);
      if (out[i]) *out[i] = bf16(silu(sum) * up);
    }
  };
  const auto finish_sent = [&](int n) {  // the block's n-th item
    barrier_wait(shared_address(&smem.barrier[n % 2]), n / 2 % 2);
    finish(smem.exchange[n % 2]);
  };

  const unsigned reciprocal = ~0u / p.K;
  const bf16* inputs = static_cast<const bf16*>(p.x) + begin * kInt4Tile + lane % 4 * 2;
  const auto row_of = [&](const Item& item) {
    const int pair = lane_pair(work, work.group[item.group]);
    return inputs + divide(pair, p.K, reciprocal) * p.x_stride;
  };
  const bf16* x = inputs;
  Int4Rows b;
  if (items.hold(item)) load_first(x = row_of(item), count, load_rows<kPairs>, b);
  int n = 0;
  for (; items.hold(item); ++n) {
    const MoeGroup group = work.group[item.group];
    const Item after = items.after(item);
    const bf16* next = items.hold(after) ? row_of(after) : inputs;
    float acc[2][4] = {};
    multiply_run(stream, count, x, next, load_rows<kPairs>, b, acc);
    x = next;
    if constexpr (C > 1) {
      // What was sent for an item is taken up when the next one's sums are there: nobody waits. All
      // blocks have then taken up the one before, whose place the next one's sums take.
      if (n) finish_sent(n - 1);
      cluster_wait();
    }
    auto& exchange = smem.exchange[n % 2];
#pragma unroll
    for (int q = 0; q < 4; ++q) {  // outputs 8 * q + g, rows 2t and 2t + 1
      float* to = &exchange[matrix][run][(q * 8 + lane / 4) % kPart][lane % 4 * 2];
      const float2 v = {acc[q / 2][q % 2 * 2], acc[q / 2][q % 2 * 2 + 1]};
      if constexpr (C > 1)
        store_async(to, &smem.barrier[n % 2], q * kRows / kPart, v);
      else
        *reinterpret_cast<float2*>(to) = v;
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int at = i * kThreads / 2 + sum0, r = at / kPart;
      out[i] = half == 0 && i * kThreads / 2 + sum0 < kPart * kRows && r < group.count
                   ? static_cast<bf16*>(p.hidden) + int64_t{work.pair[group.first + r]} * p.F +
                         item.place * kInt4Tile + lane_place(rank * kPart + at % kPart)
                   : nullptr;
    }
    if constexpr (C > 1) {
      if (threadIdx.x == 0) barrier_expect(shared_address(&smem.barrier[n % 2]), sizeof(exchange));
      cluster_arrive();
    } else {
      __syncthreads();
      finish(exchange);
    }
    item = after;
  }
  if constexpr (C > 1) {
    if (n) finish_sent(n - 1);
    cluster_wait();
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    down_kernel(const __grid_constant__ MoeExpertsParams p) {
  auto& smem = shared_memory<Smem>();
  let_next_begin();
  const MoePlan work = plan(p, smem);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int rows = p.D / kInt4Tile, tiles = p.F / kInt4Tile;

  const auto first = [&](const Item& item) {
    return (work.group[item.group].expert * rows + item.place) * tiles;
  };
  const Items items(work.groups, rows, gridDim.x * kWarps);
  Item item = items.at(warp * gridDim.x + blockIdx.x);  // evenly over blocks where items are few
  Int4Stream stream(smem.stage[warp], p.down, p.down_scale, tiles, item, items, first);
  wait_for_previous();  // for hidden

  const auto row_of = [&](const Item& item) {
    return static_cast<const bf16*>(p.hidden) + lane % 4 * kRows +
           int64_t{lane_pair(work, work.group[item.group])} * p.F;
  };
  const bf16* x = nullptr;
  Int4Rows b;
  if (items.hold(item)) load_first(x = row_of(item), tiles, load_hidden, b);
  while (items.hold(item)) {
    const MoeGroup group = work.group[item.group];
    const Item after = items.after(item);
    const bf16* next = items.hold(after) ? row_of(after) : x;
    float acc[2][4] = {};
    multiply_run(stream, tiles, x, next, load_hidden, b, acc);
    x = next;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane % 4 * 2 + i;
      if (r >= group.count) continue;
      float* to = p.partial + int64_t{work.pair[group.first + r]} * p.D + item.place * kInt4Tile;
#pragma unroll
      for (int q = 0; q < 4; ++q) to[8 * q + lane / 4] = acc[q / 2][q % 2 * 2 + i];
    }
    item = after;
  }
}

}  // namespace

void moe_experts_int4(const MoeExpertsParams& p, Stream stream) {
  const bool pairs = reinterpret_cast<uintptr_t>(p.x) % 4 == 0 && p.x_stride % 2 == 0;
  const int64_t groups = int64_t{p.T} * p.K;
  const int sms = moe_processors();
  const auto blocks = [&](int64_t items, int most) {
    return static_cast<unsigned>(items < most ? items : most);
  };
  if (moe_many_fits(p)) {
    moe_products_many(p, stream);
    return moe_weighted_sum(p, stream);
  }
  if (!moe_sorts_itself(p)) moe_make_plan(p, stream);
  dispatch<1, 2>(moe_cluster(p), "cluster", [&](auto cluster) {
    constexpr int C = cluster.value;
    const unsigned clusters = blocks(groups * (p.F / kInt4Tile), sms * kHiddenBlocks / C);
    const Grid hidden{clusters * C, kThreads, smem_up_to<sizeof(HiddenSmem<C>)>(), C};
    dispatch(pairs, [&](auto pairs) { launch(hidden_kernel<C, pairs.value>, hidden, stream, p); });
  });
  // Short runs all begin beside hidden_kernel, whose blocks leave room for one more a processor.
  const int64_t runs = groups * (p.D / kInt4Tile);
  const bool few = runs * (p.F / kInt4Tile) <= int64_t{sms} * kWarps * kStages * kStageTiles;
  const Grid down{blocks(runs, few ? sms : sms * kDownBlocks), kThreads, smem_up_to<sizeof(Smem)>(),
                  1, true};
  launch(down_kernel, down, stream, p);
  moe_weighted_sum(p, stream);
}

}  // namespace kdtree::cuda
