#include "block.h"

namespace kdtree::cpu {
namespace {

template <class Element, class Table>
void embed(const BlockEmbedParams& p) {
  const auto* mask = static_cast<const Element*>(p.mask);
  auto* out = static_cast<Element*>(p.out);
  for (int b = 0; b < p.B; ++b) {
    const int64_t id = std::clamp<int64_t>(root_of(p.token, p.length, p.X, b), 0, p.W - 1);
    const auto* row = static_cast<const Table*>(p.table) + id * p.D;
    for (int i = 0; i < p.N; ++i)
      for (int d = 0; d < p.D; ++d)
        *out++ = Element(p.scale * (i ? float(mask[d]) : float(row[d])));
  }
}

}  // namespace

void block_embed(const BlockEmbedParams& p, Stream) {
  dispatch(p.dtype, [&](auto element) {
    dispatch(p.table_dtype, [&](auto table) { embed<decltype(element), decltype(table)>(p); });
  });
}

}  // namespace kdtree::cpu
