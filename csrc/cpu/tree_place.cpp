#include <algorithm>

#include "common.h"

namespace kdtree::cpu {

void tree_place(const TreePlaceParams& p, Stream) {
  for (int b = 0; b < p.B; ++b) {
    const int32_t* table = p.block_table + int64_t{b} * p.max_pages;
    for (int n = 0; n < p.N; ++n) {
      const int64_t at = int64_t{b} * p.N + n;
      const int index = p.context[b] + n;
      const int page = table[std::min(index / kPage, p.max_pages - 1)];
      const bool padding = p.ancestors && p.ancestors[at] == 0;
      p.position[at] = padding ? -1 : p.context[b] + p.depth[at];
      p.slot[at] = padding ? -1 : page * kPage + index % kPage;
    }
  }
}

}  // namespace kdtree::cpu
