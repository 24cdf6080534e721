// Keys and values of committed tokens go to a drafter's cache, in all layers.
//
//   row of (layer, sequence, position) = (rotate(norm(key heads), position) | value heads)
//
// Grid    x: places of the sequences' paths, y: layers; a warp takes every kWarps-th head.
// Reads   a node's keys twice (the second time from L1), its values, one row of the rotation table.
// Floor   4 * Q * J * L * G * width elements of HBM: 8 nodes of 6 layers of 8 heads of 128, bf16, are
//         393 KB: launch latency.
// Needs   nothing: elements are read one by one, coalesced.
#include "block.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

template <class Element>
__global__ void __launch_bounds__(kThreads)
    block_append_kernel(const __grid_constant__ BlockAppendParams p) {
  begin_early();
  const int q = blockIdx.x / p.J, i = blockIdx.x % p.J, l = blockIdx.y;
  const int64_t kept = p.kept ? p.kept[q] : p.J, end = p.start[q] + kept;
  const int64_t position = int64_t{p.start[q]} + i;
  const int S = p.begin[l + 1] - p.begin[l], n = p.path ? p.path[blockIdx.x] : i;
  if (i >= kept || position < max(int64_t{0}, end - S) || n < 0 || n >= p.N) return;

  const int64_t row = int64_t{p.sequences} * p.begin[l] + int64_t{p.first + q} * S + position % S;
  const int64_t size = int64_t{2} * p.G * p.width;
  const auto* x = static_cast<const Element*>(p.kv) + ((int64_t{q} * p.N + n) * p.L + l) * size;
  const auto* norm = static_cast<const Element*>(p.k_norm) + int64_t{l} * p.width;
  auto* y = static_cast<Element*>(p.cache) + row * size;
  for (int head = threadIdx.x / kWarp; head < 2 * p.G; head += kWarps) {
    const int64_t at = int64_t{head} * p.width;
    if (head < p.G)
      turn(x + at, norm, p.rope, p.positions, position, p.width, p.eps,
           [&](int c, float value) { y[at + c] = Element(value); });
    else
      for (int c = threadIdx.x % kWarp; c < p.width; c += kWarp) y[at + c] = x[at + c];
  }
}

}  // namespace

void block_append(const BlockAppendParams& p, Stream stream) {
  dispatch(p.dtype, [&](auto element) {
    const Grid grid{.blocks = dim3(p.Q * p.J, p.L), .threads = kThreads, .early = true};
    launch(block_append_kernel<decltype(element)>, grid, stream, p);
  });
}

}  // namespace kdtree::cuda
