// The first half of moe_experts for few rows an expert: h, of INT4 gate and up.
//
//   h[t, k] = silu(gate[ids[t, k]] x[t]) * (up[ids[t, k]] x[t]), rounded to bf16
//
// Grid    a block of sixteen warps a processor, or two of eight where F is at most 512, so that down's
//         first blocks find room before the last of these end, or where a block may not have so much
//         shared memory. A block's teams take up its items (group of up to 8 rows of an expert,
//         tile row of 32 outputs) as they come to them. Where there are few items all warps of a
//         block, or of a cluster of two, take one together.
// Tiling  the inputs of a tile row are R runs of equally many tiles. A warp multiplies a run of the
//         gate and the same of up, by the same rows; where items are few, of one of them:
//
//           both: | warp 0 | warp 1 | warp 2 | warp 3 |     gate  | warp 0 | .. | warp 3 |
//                 |     a run of each, a team       |     up    | warp 4 | .. | warp 7 |
//
//         The runs' sums meet in shared memory, in a cluster each block's share of the outputs in
//         its own.
// Smem    per warp a ring of 16 tiles (9 KB), the plan (10 KB), the runs' sums (8 KB a team): 187
//         KB, or 98 KB of eight warps.
// Reads   a touched expert's weights once per group of its rows (from HBM once); rows, from L2,
//         once per 32 outputs.
// Floor   see moe_experts_int4.cu. A tile's 1024 codes take 56 instructions of a warp and some 6 of
//         what surrounds them, at best 16 cycles of a processor; its bytes take 31 at 1.75 GHz.
// Needs   packed weights on 16 bytes; rows and scales may start anywhere; sm_90 or later.
#include "moe_few.cuh"

namespace kdtree::cuda {
namespace {

using bf16 = __nv_bfloat16;

// How a cluster of C blocks shares the R runs of a hidden output; S: sides of a warp, one of gate
// and up or both.
template <int kWarps, int R, int C, int S, int K, int N>
struct Share {
  static constexpr int kRuns = R / C;            // of a block
  static constexpr int kTeam = kRuns * 2 / S;    // warps that meet for an item
  static constexpr int kTeams = kWarps / kTeam;  // of a block
  static constexpr int kPart = kInt4Tile / C;    // outputs that a block finishes
  static_assert(kWarps % kTeam == 0 && (C == 1 || kTeams == 1));

  struct Smem : CommonSmem<kWarps, kTeams, S, K, N> {
    alignas(16) float exchange[kTeams][2][R][kPart * kRows];  // [team][gate, up][run]
    uint64_t barrier;
  };
};

// Where an output's sum for a row stands among a run's: neither its store nor its load meets a bank
// more than twice.
__device__ int exchanged(int output, int row) {
  return output * kRows + (row ^ output / 4 % 4 * 2);
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
      b[j] = half[0] | uint32_t{half[1]} << 16;
    }
  }
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

template <int kWarps, int R, int C, int S, int K, int N, bool kPairs>
__global__ void __launch_bounds__(kWarps* kWarp,
                                  kWarps == kFewWarps && kPairs && (S == 1 || R > kMoeRuns) ? 2 : 1)
    hidden_kernel(const __grid_constant__ MoeExpertsParams p) {
  using Share = Share<kWarps, R, C, S, K, N>;
  constexpr int kTeam = Share::kTeam, kTeams = Share::kTeams, kPart = Share::kPart;
  auto& smem = shared_memory<typename Share::Smem>();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp,
            rank = C > 1 ? cluster_rank() : 0;
  const uint32_t barrier = shared_address(&smem.barrier);
  if (C > 1 && threadIdx.x == 0) {
    Barrier::init(barrier, 1);
    Barrier::fence_init();
  }
  wait_for_previous();
  const MoePlan& work = plan<kWarps * kWarp>(p, smem);
  if (C > 1 && threadIdx.x == 0) Barrier::expect(barrier, sizeof(smem.exchange));
  if (C > 1) cluster_arrive();
  const int rows = p.F / kInt4Tile, tiles = p.D / kInt4Tile;
  const int team = warp / kTeam, matrix = S == 1 ? warp % kTeam / Share::kRuns : 0;
  const auto run_of = [&](int warp) { return rank * Share::kRuns + warp % Share::kRuns; };
  const int length = ceil_div(tiles, R), run = run_of(warp);
  const int begin = min(run * length, tiles), count = min(length, tiles - begin);

  const auto item_at = [&](int n) {  // the team's n-th item: group * rows + tile row
    const int i = kTeams > 1 ? smem.queue.take(team, n) : n;
    return static_cast<int>(blockIdx.x / C + i * (gridDim.x / C));
  };
  // The n-th, found anew where that takes no queue: registers are short.
  const auto again = [&](int item, int n) { return kTeams > 1 ? item : item_at(n); };
  const auto there = [&](int item) { return item < work.groups * rows; };
  int copied = 0;
  const auto next = [&](int& tile, int& apart) {
    const int item = item_at(copied++);
    if (!there(item)) return false;
    tile = ((2 * work.group[item / rows].expert + matrix) * rows + item % rows) * tiles + begin;
    apart = rows * tiles;
    return true;
  };
  Int4Stream<S, K, N, decltype(next)> stream(smem.stage[warp], p.gate_up, p.gate_up_scale, count,
                                             next);
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
      static_cast<bf16*>(p.hidden)[int64_t{work.pair[group.first + r]} * p.F +
                                   item % rows * kInt4Tile + lane_place(rank * kPart + output)] =
          gated(gate, up);
    }
  };

  const auto row_of = [&](int item) {  // beyond the last, any
    const int pair = there(item) ? lane_pair(work, work.group[item / rows]) : 0;
    return static_cast<const bf16*>(p.x) +
           (pair / p.K * p.x_stride + begin * kInt4Tile + lane % 4 * 2);
  };
  int item = item_at(0);
  const bf16* x = row_of(item);
  Int4Rows<K> b = {};
  load_first<K>(x, count, load_rows<kPairs>, b);
  for (int n = 0; there(item); ++n) {
    Int4Sums<S> acc = {};
    int after;
    const auto next_row = [&] { return row_of(after = item_at(n + 1)); };
    multiply_run<S, K>(stream, count, x, next_row, load_rows<kPairs>, b, acc);
    if (count == 0) after = item_at(n + 1);
    if constexpr (C > 1)
      cluster_wait();  // the others' barriers are there
    else
      meet<kTeam, kTeams>(team);  // all have taken up the sums before
    const int lane = thread_now() % kWarp;
    const int run_now = kTeams > 1 ? run : run_of(thread_now() / kWarp);
#pragma unroll
    for (int side = 0; side < S; ++side)
#pragma unroll
      for (int q = 0; q < 4; ++q) {  // outputs 8 * q + g, rows 2t and 2t + 1
        const int output = q * 8 + lane / 4;
        float* to =
            &smem.exchange[team][matrix + side][run_now][exchanged(output % kPart, lane % 4 * 2)];
        const float2 v = {acc[side][q / 2][q % 2 * 2], acc[side][q / 2][q % 2 * 2 + 1]};
        if constexpr (C > 1)
          store_async(to, &smem.barrier, output / kPart, v);
        else
          *reinterpret_cast<float2*>(to) = v;
      }
    if (kTeams > 1 && thread_now() % (kTeam * kWarp) == 0)
      smem.queue.leave(team, n + MoeQueue<1>::kAhead - 1);
    if constexpr (C > 1)
      Barrier::wait_for_cluster(barrier, 0);
    else
      meet<kTeam, kTeams>(team);
    finish(again(item, n));
    if (C > 1) return;  // there are as many clusters as items
    item = again(after, n + 1);
  }
  if (C > 1) cluster_wait();
}

template <int kWarps, int R, int C, int S, int K, int N>
void launch_hidden(const MoeExpertsParams& p, Stream stream, bool pairs, int64_t items) {
  using Smem = typename Share<kWarps, R, C, S, K, N>::Smem;
  const int64_t most = C > 1 ? items : moe_processors() * int64_t{2 * kFewWarps / kWarps};
  const unsigned clusters = items < most ? items : most;
  const Grid grid{.blocks = clusters * C,
                  .threads = kWarps * kWarp,
                  .smem = smem_up_to<sizeof(Smem), kLimit<Smem>>(),
                  .cluster = C,
                  .early = true};
  dispatch(pairs, [&](auto pairs) {
    if constexpr (pairs || kWarps == kFewWarps)
      launch(hidden_kernel<kWarps, R, C, S, K, N, pairs.value>, grid, stream, p);
  });
}

}  // namespace

void moe_hidden_few(const MoeExpertsParams& p, Stream stream) {
  constexpr int R = kMoeRuns;
  const bool pairs = reinterpret_cast<uintptr_t>(p.x) % 4 == 0 && p.x_stride % 2 == 0;
  const bool many = pairs && many_warps_fit();
  const int64_t items = int64_t{p.T} * p.K * (p.F / kInt4Tile);
  const int sms = moe_processors();
  if (moe_cluster(p) == 1) {
    constexpr int kFew = 8;  // items a processor, each of eight warps
    if (items < kFew * sms) return launch_hidden<kFewWarps, R, 1, 1, 8, 2>(p, stream, pairs, items);
    if (many) return launch_hidden<kManyWarps, R, 1, 2, 4, 2>(p, stream, pairs, items);
    return launch_hidden<kFewWarps, R, 1, 2, 4, 2>(p, stream, pairs, items);
  }
  if (items <= sms) return launch_hidden<kFewWarps, 2 * R, 2, 1, 4, 4>(p, stream, pairs, items);
  launch_hidden<kFewWarps, 2 * R, 1, 2, 4, 2>(p, stream, pairs, items);
}

}  // namespace kdtree::cuda
