// Embeddings of a drafter's block.
//
//   out[b, 0] = scale * table[root of b], out[b, i] = scale * mask for the other slots
//
// Grid    one block per slot; thread i owns features i, i + kThreads, ...
// Reads   the root's row, and the mask once a slot (from L2).
// Floor   B * N * D elements of HBM: at 8 slots of 7168, bf16, 115 KB: launch latency.
// Needs   nothing: elements are read one by one, coalesced.
#include "block.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 256;

template <class Element, class Table>
__global__ void __launch_bounds__(kThreads)
    block_embed_kernel(const __grid_constant__ BlockEmbedParams p) {
  begin_early();
  const int b = blockIdx.x / p.N;
  const bool root = blockIdx.x % p.N == 0;
  const int64_t id = root ? clamped_id(root_of(p.token, p.length, p.X, b), p.W) : 0;
  const auto* row = static_cast<const Table*>(p.table) + id * p.D;
  const auto* mask = static_cast<const Element*>(p.mask);
  auto* out = static_cast<Element*>(p.out) + int64_t{blockIdx.x} * p.D;
  for (int d = threadIdx.x; d < p.D; d += kThreads)
    out[d] = Element(p.scale * (root ? float(row[d]) : float(mask[d])));
}

}  // namespace

void block_embed(const BlockEmbedParams& p, Stream stream) {
  dispatch(p.dtype, [&](auto element) {
    dispatch(p.table_dtype, [&](auto table) {
      const Grid grid{
          .blocks = static_cast<unsigned>(p.B * p.N), .threads = kThreads, .early = true};
      launch(block_embed_kernel<decltype(element), decltype(table)>, grid, stream, p);
    });
  });
}

}  // namespace kdtree::cuda
