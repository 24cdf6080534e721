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
#include "moe_queue.cuh"

namespace kdtree::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kFewWarps = 8;    // of a block: two fit a processor
constexpr int kManyWarps = 16;  // one fits

template <int kWarps, int kTeams, int S, int N>
struct CommonSmem {
  Int4Stage<S> stage[kWarps][N];
  MoeGroup group[kMoePairs];
  int pair[kMoePairs];
  int2 plan[kWarps];
  int first[kMoeExperts];
  MoePlan work;
  MoeQueue<kTeams> queue;
};

// How a cluster of C blocks shares the R runs of a hidden output; S: sides of a warp, one of gate and up
// or both.
template <int kWarps, int R, int C, int S, int N>
struct Share {
  static constexpr int kRuns = R / C;            // of a block
  static constexpr int kTeam = kRuns * 2 / S;    // warps that meet for an item
  static constexpr int kTeams = kWarps / kTeam;  // of a block
  static constexpr int kPart = kInt4Tile / C;    // outputs that a block finishes
  static_assert(kWarps % kTeam == 0 && (C == 1 || kTeams == 1));

  struct Smem : CommonSmem<kWarps, kTeams, S, N> {
    alignas(16) float exchange[kTeams][2][R][kPart * kRows];  // [team][gate, up][run]
    uint64_t barrier;
  };
};

// Where an output's sum for a row stands among a run's: neither its store nor its load meets a bank
// more than twice.
__device__ int exchanged(int output, int row) { return output * kRows + (row ^ output / 4 % 4 * 2); }

template <class T>
__device__ T& shared_memory() {
  extern __shared__ __align__(128) char bytes[];
  return *reinterpret_cast<T*>(bytes);
}

__device__ float silu(float x) { return x / (1 + expf(-x)); }

// The plan stays in shared memory: registers are short.
template <int kThreads, class Smem>
__device__ const MoePlan& plan(const MoeExpertsParams& p, Smem& smem) {
  smem.queue.open();
  MoePlan work = {smem.group, smem.pair, 0};
  if (moe_sorts_itself(p))
    work.groups = make_groups<kThreads>(p, kRows, smem.first, smem.plan, smem.group, smem.pair);
  else
    work = made_plan(p);
  if (threadIdx.x == 0) smem.work = work;
  __syncthreads();
  return smem.work;
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

// threadIdx.x, asked anew: what follows from it is not kept in registers through the products.
__device__ int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Waits for the warps of a team.
template <int kTeam, int kTeams>
__device__ void meet(int team) {
  if constexpr (kTeams == 1)
    __syncthreads();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kTeam * kWarp) : "memory");
}

template <int kWarps, int R, int C, int S, int N, bool kPairs>
__global__ void __launch_bounds__(kWarps* kWarp, kPairs ? 2 * kFewWarps / kWarps : 1)
    hidden_kernel(const __grid_constant__ MoeExpertsParams p) {
  using Share = Share<kWarps, R, C, S, N>;
  constexpr int kTeam = Share::kTeam, kTeams = Share::kTeams, kPart = Share::kPart;
  auto& smem = shared_memory<typename Share::Smem>();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp,
            rank = C > 1 ? cluster_rank() : 0;
  const uint32_t barrier = shared_address(&smem.barrier);
  if (C > 1 && threadIdx.x == 0) {
    barrier_init(barrier);
    barrier_init_fence();
    barrier_expect(barrier, sizeof(smem.exchange));
  }
  const MoePlan& work = plan<kWarps * kWarp>(p, smem);
  if (C > 1) cluster_arrive<true>();
  const int rows = p.F / kInt4Tile, tiles = p.D / kInt4Tile;
  const int team = warp / kTeam, matrix = S == 1 ? warp % kTeam / Share::kRuns : 0;
  const int length = ceil_div(tiles, R), run = rank * Share::kRuns + warp % Share::kRuns;
  const int begin = min(run * length, tiles), count = min(length, tiles - begin);

  const auto item_at = [&](int n) {  // the team's n-th item: group * rows + tile row
    return static_cast<int>(blockIdx.x / C + smem.queue.take(team, n) * (gridDim.x / C));
  };
  const int items = work.groups * rows;
  int copied = 0;
  const auto next = [&](int& tile, int& apart) {
    const int item = item_at(copied++);
    if (item >= items) return false;
    tile = ((2 * work.group[item / rows].expert + matrix) * rows + item % rows) * tiles + begin;
    apart = rows * tiles;
    return true;
  };
  Int4Stream<S, N, decltype(next)> stream(smem.stage[warp], p.gate_up, p.gate_up_scale, count, next);
  let_next_begin();  // whose weights come after these

  // A thread finishes an output of some rows, the same of all items.
  constexpr int kPass = kTeam * kWarp / kPart;  // rows that a team finishes at once
  const auto finish = [&](int item) {
    const int thread = thread_now() % (kTeam * kWarp), output = thread % kPart;
    const MoeGroup group = work.group[item / rows];
    const auto& exchange = smem.exchange[team];
    for (int r = thread / kPart; r < group.count; r += kPass) {
      float gate = 0, up = 0;
#pragma unroll
      for (int i = 0; i < R; ++i) {
        gate += exchange[0][i][exchanged(output, r)];
        up += exchange[1][i][exchanged(output, r)];
      }
      static_cast<bf16*>(
          p.hidden)[int64_t{work.pair[group.first + r]} * p.F + item % rows * kInt4Tile +
                    lane_place(rank * kPart + output)] = bf16(silu(gate) * up);
    }
  };

  const auto row_of = [&](int item) {  // beyond the last, any
    const int pair = item < items ? lane_pair(work, work.group[item / rows]) : 0;
    return static_cast<const bf16*>(p.x) +
           (pair / p.K * p.x_stride + begin * kInt4Tile + lane % 4 * 2);
  };
  int item = item_at(0);
  const bf16* x = row_of(item);
  Int4Rows<S> b = {};
  load_first(x, count, load_rows<kPairs>, b);
  for (int n = 0; item < items; ++n) {
    Int4Sums<S> acc = {};
    int after;
    const auto next_row = [&] { return row_of(after = item_at(n + 1)); };
    multiply_run<S>(stream, count, x, next_row, load_rows<kPairs>, b, acc);
    if (count == 0) after = item_at(n + 1);
    if constexpr (C > 1)
      cluster_wait();  // the others' barriers are there
    else
      meet<kTeam, kTeams>(team);  // all have taken up the sums before
    const int lane = thread_now() % kWarp;
#pragma unroll
    for (int side = 0; side < S; ++side)
#pragma unroll
      for (int q = 0; q < 4; ++q) {  // outputs 8 * q + g, rows 2t and 2t + 1
        const int output = q * 8 + lane / 4;
        float* to = &smem.exchange[team][matrix + side][run]
                                  [exchanged(output % kPart, lane % 4 * 2)];
        const float2 v = {acc[side][q / 2][q % 2 * 2], acc[side][q / 2][q % 2 * 2 + 1]};
        if constexpr (C > 1)
          store_async(to, &smem.barrier, output / kPart, v);
        else
          *reinterpret_cast<float2*>(to) = v;
      }
    if (thread_now() % (kTeam * kWarp) == 0) smem.queue.leave(team, n + MoeQueue<1>::kAhead - 1);
    if constexpr (C > 1)
      barrier_wait(barrier, 0);
    else
      meet<kTeam, kTeams>(team);
    finish(item);
    if (C > 1) return;  // there are as many clusters as items
    item = after;
  }
  if (C > 1) cluster_wait();
}

template <int kWarps, int S, int N>
__global__ void __launch_bounds__(kWarps* kWarp, 2 * kFewWarps / kWarps)
    down_kernel(const __grid_constant__ MoeExpertsParams p) {
  auto& smem = shared_memory<CommonSmem<kWarps, kWarps, S, N>>();
  let_next_begin();
  const MoePlan& work = plan<kWarps * kWarp>(p, smem);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int rows = p.D / kInt4Tile, tiles = p.F / kInt4Tile;

  const int places = ceil_div(rows, S);
  const auto item_at = [&](int n) {  // the warp's n-th item: group * places + place
    return static_cast<int>(blockIdx.x + smem.queue.take(warp, n) * gridDim.x);
  };
  const int items = work.groups * places;
  int copied = 0;
  const auto next = [&](int& tile, int& apart) {
    const int item = item_at(copied++);
    if (item >= items) return false;
    const int row = item % places * S;
    tile = (work.group[item / places].expert * rows + row) * tiles;
    apart = row + 1 < rows ? tiles : 0;  // without a second, the first again
    return true;
  };
  Int4Stream<S, N, decltype(next)> stream(smem.stage[warp], p.down, p.down_scale, tiles, next);
  wait_for_previous();  // for hidden

  const auto row_of = [&](int item) {  // beyond the last, any
    const int pair = item < items ? lane_pair(work, work.group[item / places]) : 0;
    return static_cast<const bf16*>(p.hidden) + (int64_t{pair} * p.F + lane % 4 * kRows);
  };
  int item = item_at(0);
  const bf16* x = row_of(item);
  Int4Rows<S> b = {};
  load_first(x, tiles, load_hidden, b);
  for (int n = 0; item < items; ++n) {
    Int4Sums<S> acc = {};
    int after;
    const auto next_row = [&] { return row_of(after = item_at(n + 1)); };
    multiply_run<S>(stream, tiles, x, next_row, load_hidden, b, acc);
    const MoeGroup group = work.group[item / places];
    const int row = item % places * S;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane % 4 * 2 + i;
      if (r >= group.count) continue;
      float* to = p.partial + int64_t{work.pair[group.first + r]} * p.D +
                  row * kInt4Tile + lane / 4;
#pragma unroll
      for (int side = 0; side < S; ++side) {
        if (row + side >= rows) break;
#pragma unroll
        for (int q = 0; q < 4; ++q) to[side * kInt4Tile + 8 * q] = acc[side][q / 2][q % 2 * 2 + i];
      }
    }
    if (lane == 0) smem.queue.leave(warp, n + MoeQueue<1>::kAhead - 1);
    item = after;
  }
}

#ifndef BIG
#define BIG 1
#define DSIDES 2
#endif

template <int kWarps, int R, int C, int S, int N = 2>
void launch_hidden(const MoeExpertsParams& p, Stream stream, bool pairs, int64_t items, int sms) {
  using Smem = typename Share<kWarps, R, C, S, N>::Smem;
  constexpr int kLimit = sizeof(Smem) > kSmemEverywhere ? kSmemSm90 : kSmemEverywhere;
  const int64_t most = C > 1 ? items : int64_t{sms} * (2 * kFewWarps / kWarps);
  const unsigned clusters = items < most ? items : most;
  const Grid grid{clusters * C, kWarps * kWarp, smem_up_to<sizeof(Smem), kLimit>(), C};
  dispatch(pairs, [&](auto pairs) {
    if constexpr (pairs || kLimit == kSmemEverywhere)
      launch(hidden_kernel<kWarps, R, C, S, N, pairs.value>, grid, stream, p);
  });
}

template <int kWarps, int S, int N = 2>
void launch_down(const MoeExpertsParams& p, Stream stream, int64_t most, int64_t groups) {
  using Smem = CommonSmem<kWarps, kWarps, S, N>;
  constexpr int kLimit = sizeof(Smem) > kSmemEverywhere ? kSmemSm90 : kSmemEverywhere;
  const int64_t items = groups * ceil_div(p.D / kInt4Tile, S);
  const Grid grid{static_cast<unsigned>(items < most ? items : most), kWarps * kWarp,
                  smem_up_to<sizeof(Smem), kLimit>(), 1, true};
  launch(down_kernel<kWarps, S, N>, grid, stream, p);
}

}  // namespace

void moe_experts_int4(const MoeExpertsParams& p, Stream stream) {
  const bool pairs = reinterpret_cast<uintptr_t>(p.x) % 4 == 0 && p.x_stride % 2 == 0;
  const int64_t groups = int64_t{p.T} * p.K;
  const int sms = moe_processors();
  if (moe_many_fits(p)) {
    moe_products_many(p, stream);
    return moe_weighted_sum(p, stream);
  }
  if (!moe_sorts_itself(p)) moe_make_plan(p, stream);
  const int64_t items = groups * (p.F / kInt4Tile);
  const bool big = BIG && pairs;
  constexpr int R = kMoeRuns;
  if (moe_cluster(p) == 1) {
    if (items < 8 * sms)  // a team of eight warps: more are at work
      launch_hidden<kFewWarps, R, 1, 1>(p, stream, pairs, items, sms);
    else if (big)
      launch_hidden<kManyWarps, R, 1, 2>(p, stream, pairs, items, sms);
    else
      launch_hidden<kFewWarps, R, 1, 2>(p, stream, pairs, items, sms);
  } else if (items <= sms) {
    if (big)
      launch_hidden<kFewWarps, 2 * R, 2, 1, 3>(p, stream, pairs, items, sms);
    else
      launch_hidden<kFewWarps, 2 * R, 2, 1>(p, stream, pairs, items, sms);
  } else if (big) {
    launch_hidden<kManyWarps, 2 * R, 1, 2>(p, stream, pairs, items, sms);
  } else {
    launch_hidden<kFewWarps, 2 * R, 1, 2>(p, stream, pairs, items, sms);
  }
  // Short runs all begin beside hidden_kernel, whose blocks leave room for one more a processor.
  const int64_t runs = groups * (p.D / kInt4Tile);
  const bool few = runs * (p.F / kInt4Tile) <= int64_t{sms} * kFewWarps * 2 * kStageTiles;
  if (few || runs < 2 * kManyWarps * sms)
    launch_down<kFewWarps, 1>(p, stream, few ? sms : 2 * sms, groups);
  else if (BIG)
    launch_down<kManyWarps, DSIDES>(p, stream, sms, groups);
  else
    launch_down<kFewWarps, DSIDES>(p, stream, 2 * sms, groups);
  moe_weighted_sum(p, stream);
}

}  // namespace kdtree::cuda
