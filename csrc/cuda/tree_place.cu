// Positions and cache slots of a tree's nodes.
//
//   position = context + depth; slot = block_table[(context + n) / 64] * 64 + (context + n) % 64
//
// Grid    a thread a node.
// Floor   20 bytes a node, or 12 of a chain: launch latency and two dependent reads.
// Needs   nothing.
#include "common.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    tree_place_kernel(const __grid_constant__ TreePlaceParams p) {
  begin_early();
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= int64_t{p.B} * p.N) return;
  const int b = static_cast<int>(at / p.N), n = static_cast<int>(at % p.N);
  const bool padding = p.ancestors && p.ancestors[at] == 0;
  const int depth = p.depth[at], context = p.context[b], index = context + n;
  const int page = min(index / kPage, p.max_pages - 1);
  const int slot = p.block_table[int64_t{b} * p.max_pages + page] * kPage + index % kPage;
  p.position[at] = padding ? -1 : context + depth;
  p.slot[at] = padding ? -1 : slot;
}

}  // namespace

void tree_place(const TreePlaceParams& p, Stream stream) {
  const Grid grid{
      .blocks = ceil_div(p.B * p.N, kThreads), .threads = kThreads, .early = true};
  launch(tree_place_kernel, grid, stream, p);
}

}  // namespace kdtree::cuda
