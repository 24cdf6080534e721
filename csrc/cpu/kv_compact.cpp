#include <algorithm>
#include <cstring>

#include "common.h"

namespace kdtree::cpu {

// In order of i a row is read before anything is written over it: with path ascending and
// path[i] >= i, row i's target lies below every later row's source.
static void kv_compact(const KvCompactParams& p, int l, int b) {
  const int64_t row_bytes = int64_t{p.Z} * p.element_size;
  auto* layer = static_cast<char*>(p.cache) + l * p.pages * kPage * row_bytes;
  const int32_t* table = p.block_table + int64_t{b} * p.max_pages;
  const auto row = [&](int slot) {
    return layer + (int64_t{table[slot / kPage]} * kPage + slot % kPage) * row_bytes;
  };
  const int32_t* path = p.path + int64_t{b} * p.J;
  for (int i = 0; i < std::min(p.length[b], p.J); ++i)
    if (path[i] != i) std::memcpy(row(p.context[b] + i), row(p.context[b] + path[i]), row_bytes);
}

void kv_compact(const KvCompactParams& p, Stream) {
  constexpr int kGrain = 8;  // paths worth a thread
  parallel_for(int64_t{p.L} * p.B, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kv_compact(p, static_cast<int>(i / p.B), static_cast<int>(i % p.B));
  });
}

}  // namespace kdtree::cpu
