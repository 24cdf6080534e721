// The second half of moe_experts for few rows an expert, but for the weighted sum.
//
//   partial[t, k] = down[ids[t, k]] h[t, k]
//
// Grid    as for moe_few_hidden.cu; it begins before that has ended: the first weights come while
//         the last of hidden's are multiplied. A warp multiplies a tile row, or two by the same
//         rows, alone: a run is all inputs, and no one waits for another. Warps take up items as
//         they come to them; where runs are short, every one has a fixed share.
// Smem    per warp a ring of 16 tiles (9 KB), and the plan (10 KB): 155 KB, or 83 KB of eight
//         warps.
// Reads   as moe_few_hidden.cu.
// Floor   see moe_experts_int4.cu.
// Needs   packed weights on 16 bytes; scales may start anywhere; sm_90 or later.
#include "moe_few.cuh"

namespace kdtree::cuda {
namespace {

using bf16 = __nv_bfloat16;

// The B fragments of a tile of hidden, whose tiles are kept by lanes. It is no load of constants:
// another kernel may have written them since this one began.
__device__ void load_hidden(const bf16* from, uint32_t (&b)[4]) {
  const uint4 v = load_now(reinterpret_cast<const uint4*>(from));
  b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
}

template <int kWarps, int S, int K, int N, bool kShared>
__global__ void __launch_bounds__(kWarps* kWarp, kWarps == kFewWarps && !kShared ? 2 : 1)
    down_kernel(const __grid_constant__ MoeExpertsParams p) {
  auto& smem = shared_memory<CommonSmem<kWarps, kWarps, S, K, N>>();
  let_next_begin();
  const MoePlan& work = plan<kWarps * kWarp>(p, smem);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int rows = p.D / kInt4Tile, tiles = p.F / kInt4Tile;

  const int places = ceil_div(rows, S);
  const auto item_at = [&](int n) {  // the warp's n-th item: group * places + place
    const int i = kShared ? smem.queue.take(warp, n) : n * kWarps + warp;
    return static_cast<int>(blockIdx.x + i * gridDim.x);
  };
  const auto there = [&](int item) { return item < work.groups * places; };
  int copied = 0;
  const auto next = [&](int& tile, int& apart) {
    const int item = item_at(copied++);
    if (!there(item)) return false;
    const int row = item % places * S;
    tile = (work.group[item / places].expert * rows + row) * tiles;
    apart = row + 1 < rows ? tiles : 0;  // without a second, the first again
    return true;
  };
  Int4Stream<S, K, N, decltype(next)> stream(smem.stage[warp], p.down, p.down_scale, tiles, next);
  wait_for_previous();  // for hidden

  const auto row_of = [&](int item) {  // beyond the last, any
    const int pair = there(item) ? lane_pair(work, work.group[item / places]) : 0;
    return static_cast<const bf16*>(p.hidden) + (int64_t{pair} * p.F + lane % 4 * kRows);
  };
  int item = item_at(0);
  const bf16* x = row_of(item);
  Int4Rows<K> b = {};
  load_first<K>(x, tiles, load_hidden, b);
  for (int n = 0; there(item); ++n) {
    Int4Sums<S> acc = {};
    int after;
    const auto next_row = [&] { return row_of(after = item_at(n + 1)); };
    multiply_run<S, K>(stream, tiles, x, next_row, load_hidden, b, acc);
    const MoeGroup group = work.group[item / places];
    const int row = item % places * S;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane % 4 * 2 + i;
      if (r >= group.count) continue;
      float* to =
          p.partial + int64_t{work.pair[group.first + r]} * p.D + row * kInt4Tile + lane / 4;
#pragma unroll
      for (int side = 0; side < S; ++side) {
        if (row + side >= rows) break;
#pragma unroll
        for (int q = 0; q < 4; ++q)
          to[side * kInt4Tile + 8 * q] = acc[side][q / 2][q % 2 * 2 + i] * kInt4Unit;
      }
    }
    if (kShared && lane == 0) smem.queue.leave(warp, n + MoeQueue<1>::kAhead - 1);
    item = after;
  }
}

template <int kWarps, int S, int K, int N, bool kShared>
void launch_down(const MoeExpertsParams& p, Stream stream, int64_t most) {
  using Smem = CommonSmem<kWarps, kWarps, S, K, N>;
  const int64_t items = int64_t{p.T} * p.K * ceil_div(p.D / kInt4Tile, S);
  const Grid grid{.blocks = static_cast<unsigned>(items < most ? items : most),
                  .threads = kWarps * kWarp,
                  .smem = smem_up_to<sizeof(Smem), kLimit<Smem>>(),
                  .early = true};
  launch(down_kernel<kWarps, S, K, N, kShared>, grid, stream, p);
}

}  // namespace

void moe_down_few(const MoeExpertsParams& p, Stream stream) {
  constexpr int kShort = 16;  // tiles of a run that is not worth a turn at the queue
  const int sms = moe_processors(), tiles = p.F / kInt4Tile;
  const int64_t runs = int64_t{p.T} * p.K * (p.D / kInt4Tile);
  if (runs < 2 * kManyWarps * sms) {
    // Short runs all begin beside the kernel before, whose blocks leave room for one a processor.
    constexpr int kRing = 16;  // tiles
    const bool beside = runs * tiles <= int64_t{sms} * kFewWarps * kRing;
    if (tiles <= kShort)
      launch_down<kFewWarps, 1, 4, 4, false>(p, stream, beside ? sms : 2 * sms);
    else
      launch_down<kFewWarps, 1, 8, 2, false>(p, stream, beside ? sms : 2 * sms);
  } else if (tiles <= kShort) {
    launch_down<kFewWarps, 2, 4, 2, false>(p, stream, 2 * sms);
  } else if (many_warps_fit()) {
    launch_down<kManyWarps, 1, 8, 2, true>(p, stream, sms);
  } else {
    launch_down<kFewWarps, 1, 8, 2, true>(p, stream, 2 * sms);
  }
}

}  // namespace kdtree::cuda
