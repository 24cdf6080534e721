// Routed experts, but for INT4 and bf16 rows: tensor_cores/moe_experts_int4.cu.
//
//   h[t, k] = silu(gate[ids[t, k]] x[t]) * (up[ids[t, k]] x[t]), rounded to dtype
//   y[t] = sum over k in order of weights[t, k] * (down[ids[t, k]] h[t, k]), + shared[t]
//
// Grid    hidden and down kernels: one block per (slot, tile of outputs), a slot being a pair
//         (t, k) where there are fewer of them than experts, else an expert; blocks without a row
//         of their own leave at once. sum_kernel: one thread per element of y.
// Tiling  a block takes its expert's rows in groups of up to kMoeRows. INT4: a tile is 32 outputs,
//         whose inputs the eight warps split (in the hidden kernel four the gate's, four the up's);
//         the warps' sums meet in shared memory, in order. Plain weights: kPlainTile outputs, four
//         weight rows at a time by block_dot (in the hidden kernel two of the gate and two of up).
// Smem    the pairs of the expert among kMoeIds ids; INT4: the rows in flight and the warps' sums.
// Reads   a touched expert's weights once per group of its rows (from HBM once), rows from L2.
// Floor   the touched experts' weights: 88 MB each for Kimi K2's dimensions in bf16 (D = 7168,
//         F = 2048), so 705 MB at T = 1, K = 8, 164 us at 4.3 TB/s (H200).
// Needs   packed weights on 16 bytes; T * K an int.
#include "dot.cuh"
#include "int4.cuh"
#include "moe_pairs.cuh"
#include "tensor_cores/moe_experts_int4.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 256;  // of the INT4 kernels and of sum_kernel
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocks = 2;       // INT4 blocks a processor that registers must allow
constexpr int kPlainBlocks = 3;  // plain ones
constexpr int kPlainTile = 16;   // outputs of a block: fewer would look through the ids too often
constexpr int kPlainRows = 4;    // weight rows of a block at a time
static_assert(kMoeRows * kInt4Tile <= kThreads, "a thread per sum");
static_assert(kMoeRows * kPlainRows <= kWarp, "block_dot's sums in one warp");

// Tiles of INT4 weights that a warp loads ahead.
template <int R>
constexpr int kAhead = kMoeRows / R;

__device__ float silu(float x) { return x / (1 + expf(-x)); }

template <class Element>
struct Int4Smem {
  alignas(16) float stage[kWarps][kMoeRows * kInt4Tile];  // kAhead<R> tiles of R rows
  float sums[kWarps][kMoeRows * kInt4Tile];
  const Element* row[kMoeRows];
  MoePairs<kThreads> pairs;

  // The sum, in order, of what the warps first .. first + count - 1 left for this thread.
  __device__ float sum(int first, int count) const {
    float s = 0;
    for (int w = first; w < first + count; ++w) s += sums[w][threadIdx.x];
    return s;
  }
};

template <class Element>
__global__ void __launch_bounds__(kThreads, kBlocks)
    int4_hidden_kernel(const __grid_constant__ MoeExpertsParams p) {
  __shared__ Int4Smem<Element> smem;
  const int hidden_tiles = p.F / kInt4Tile, tile = blockIdx.x % hidden_tiles;
  const int expert = moe_expert(p, blockIdx.x / hidden_tiles);
  if (expert < 0) return;
  const int warp = threadIdx.x / kWarp, half = kWarps / 2, tiles = p.D / kInt4Tile;
  const int64_t tile_row = (2 * int64_t{expert} + warp / half) * hidden_tiles + tile;
  const auto* w = static_cast<const int32_t*>(p.gate_up) + tile_row * tiles * kInt4Words;
  const auto* scale = static_cast<const Element*>(p.gate_up_scale) + tile_row * tiles * kInt4Tile;
  for_groups(p, expert, smem.pairs, [&]<int R>(const int* pairs, int count) {
    if (threadIdx.x < R)  // beyond the last row, the last row again: it is not stored
      smem.row[threadIdx.x] = static_cast<const Element*>(p.x) +
                              pairs[min(int(threadIdx.x), count - 1)] / p.K * p.x_stride;
    __syncthreads();
    int4_tiles<R, kAhead<R>>(w, scale, tiles, warp % half, half, smem.row, smem.stage[warp],
                             smem.sums[warp]);
    __syncthreads();
    const int r = threadIdx.x / kInt4Tile, f = tile * kInt4Tile + threadIdx.x % kInt4Tile;
    if (r < count)
      static_cast<Element*>(p.hidden)[int64_t{pairs[r]} * p.F + f] =
          Element(silu(smem.sum(0, half)) * smem.sum(half, half));
    __syncthreads();  // the sums have been read
  });
}

template <class Element>
__global__ void __launch_bounds__(kThreads, kBlocks)
    int4_down_kernel(const __grid_constant__ MoeExpertsParams p) {
  __shared__ Int4Smem<Element> smem;
  const int tile_rows = p.D / kInt4Tile, tile = blockIdx.x % tile_rows;
  const int expert = moe_expert(p, blockIdx.x / tile_rows);
  if (expert < 0) return;
  const int warp = threadIdx.x / kWarp, tiles = p.F / kInt4Tile;
  const int64_t tile_row = int64_t{expert} * tile_rows + tile;
  const auto* w = static_cast<const int32_t*>(p.down) + tile_row * tiles * kInt4Words;
  const auto* scale = static_cast<const Element*>(p.down_scale) + tile_row * tiles * kInt4Tile;
  for_groups(p, expert, smem.pairs, [&]<int R>(const int* pairs, int count) {
    if (threadIdx.x < R)
      smem.row[threadIdx.x] = static_cast<const Element*>(p.hidden) +
                              int64_t{pairs[min(int(threadIdx.x), count - 1)]} * p.F;
    __syncthreads();
    int4_tiles<R, kAhead<R>>(w, scale, tiles, warp, kWarps, smem.row, smem.stage[warp],
                             smem.sums[warp]);
    __syncthreads();
    const int r = threadIdx.x / kInt4Tile, d = tile * kInt4Tile + threadIdx.x % kInt4Tile;
    if (r < count) p.partial[int64_t{pairs[r]} * p.D + d] = smem.sum(0, kWarps);
    __syncthreads();  // the sums have been read
  });
}

template <class Element, bool kAligned>
__global__ void __launch_bounds__(kDotThreads, kPlainBlocks)
    plain_hidden_kernel(const __grid_constant__ MoeExpertsParams p) {
  __shared__ MoePairs<kDotThreads> found;
  const int tiles = (p.F - 1) / kPlainTile + 1, first = blockIdx.x % tiles * kPlainTile;
  const int expert = moe_expert(p, blockIdx.x / tiles), last = p.F - 1;
  if (expert < 0) return;
  const auto* gate = static_cast<const Element*>(p.gate_up) + 2 * int64_t{expert} * p.F * p.D;
  const auto* up = gate + int64_t{p.F} * p.D;
  for_groups(p, expert, found, [&]<int R>(const int* pairs, int count) {
    const Element* x[R];
    for (int r = 0; r < R; ++r)  // beyond the last row, the last row again: it is not stored
      x[r] = static_cast<const Element*>(p.x) + pairs[min(r, count - 1)] / p.K * p.x_stride;
    for (int f0 = first; f0 < min(first + kPlainTile, p.F); f0 += kPlainRows / 2) {
      const int64_t a = int64_t{f0} * p.D, b = int64_t{min(f0 + 1, last)} * p.D;
      const Element* w[kPlainRows] = {gate + a, gate + b, up + a, up + b};
      const float sum = block_dot<kAligned>(x, w, p.D);
      const float up_sum = __shfl_down_sync(~0u, sum, kPlainRows / 2);
      const int r = threadIdx.x / kPlainRows, o = threadIdx.x % kPlainRows;
      if (r < count && o < kPlainRows / 2 && f0 + o <= last)
        static_cast<Element*>(p.hidden)[int64_t{pairs[r]} * p.F + f0 + o] =
            Element(silu(sum) * up_sum);
    }
  });
}

template <class Element, bool kAligned>
__global__ void __launch_bounds__(kDotThreads, kPlainBlocks)
    plain_down_kernel(const __grid_constant__ MoeExpertsParams p) {
  __shared__ MoePairs<kDotThreads> found;
  const int tiles = (p.D - 1) / kPlainTile + 1, first = blockIdx.x % tiles * kPlainTile;
  const int expert = moe_expert(p, blockIdx.x / tiles), last = p.D - 1;
  if (expert < 0) return;
  const auto* down = static_cast<const Element*>(p.down) + int64_t{expert} * p.D * p.F;
  for_groups(p, expert, found, [&]<int R>(const int* pairs, int count) {
    const Element* x[R];
    for (int r = 0; r < R; ++r)
      x[r] = static_cast<const Element*>(p.hidden) + int64_t{pairs[min(r, count - 1)]} * p.F;
    for (int d0 = first; d0 < min(first + kPlainTile, p.D); d0 += kPlainRows) {
      const Element* w[kPlainRows];
      for (int o = 0; o < kPlainRows; ++o) w[o] = down + int64_t{min(d0 + o, last)} * p.F;
      const float sum = block_dot<kAligned>(x, w, p.F);
      const int r = threadIdx.x / kPlainRows, d = d0 + threadIdx.x % kPlainRows;
      if (r < count && d <= last) p.partial[int64_t{pairs[r]} * p.D + d] = sum;
    }
  });
}

template <class Element>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ MoeExpertsParams p) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t t = at / p.D, d = at % p.D;
  if (t >= p.T) return;
  float sum = 0;
  for (int64_t i = t * p.K; i < (t + 1) * p.K; ++i)
    if (p.ids[i] >= 0 && p.ids[i] < p.E) sum = fmaf(p.weights[i], p.partial[i * p.D + d], sum);
  if (p.shared) sum += float(static_cast<const Element*>(p.shared)[at]);
  static_cast<Element*>(p.y)[at] = Element(sum);
}

template <class Element, bool kAligned>
void launch_plain(const MoeExpertsParams& p, Stream stream) {
  const auto blocks = [&](int outputs) { return moe_slots(p) * ((outputs - 1) / kPlainTile + 1); };
  launch(plain_hidden_kernel<Element, kAligned>, {blocks(p.F), kDotThreads}, stream, p);
  launch(plain_down_kernel<Element, kAligned>, {blocks(p.D), kDotThreads}, stream, p);
}

template <class Element>
void launch_int4(const MoeExpertsParams& p, Stream stream) {
  const auto blocks = [&](int outputs) { return moe_slots(p) * (outputs / kInt4Tile); };
  launch(int4_hidden_kernel<Element>, {blocks(p.F), kThreads}, stream, p);
  launch(int4_down_kernel<Element>, {blocks(p.D), kThreads}, stream, p);
}

}  // namespace

void moe_experts(const MoeExpertsParams& p, Stream stream) {
  if (p.gate_up_scale && p.dtype == DType::bf16) return moe_experts_int4(p, stream);
  dispatch(p.dtype, [&](auto element) {
    using Element = decltype(element);
    const bool vectors =
        dot_aligned<Element>(p.x, p.x_stride, p.D) && dot_aligned<Element>(p.hidden, p.F, p.F) &&
        dot_aligned<Element>(p.gate_up, p.D, p.D) && dot_aligned<Element>(p.down, p.F, p.F);
    if (p.gate_up_scale)
      launch_int4<float>(p, stream);
    else if (vectors)
      launch_plain<Element, true>(p, stream);
    else
      launch_plain<Element, false>(p, stream);
    const int64_t size = int64_t{p.T} * p.D;
    launch(sum_kernel<Element>, {static_cast<unsigned>((size - 1) / kThreads + 1), kThreads},
           stream, p);
  });
}

}  // namespace kdtree::cuda
