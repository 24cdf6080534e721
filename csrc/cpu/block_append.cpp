#include "block.h"

namespace kdtree::cpu {
namespace {

// Layer l of place i of sequence q's path.
template <class Element>
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void append(const BlockAppendParams& p, int q, int i, int l) {
  const int64_t kept = p.kept ? p.kept[q] : p.J, end = p.start[q] + kept;
  const int64_t position = int64_t{p.start[q]} + i;
  const int S = p.begin[l + 1] - p.begin[l], n = p.path ? p.path[int64_t{q} * p.J + i] : i;
  if (i >= kept || position < std::max<int64_t>(0, end - S) || n < 0 || n >= p.N) return;

  const int64_t row = int64_t{p.sequences} * p.begin[l] + int64_t{p.first + q} * S + position % S;
  const int64_t half = int64_t{p.G} * p.width;  // of a row: its keys, or its values
  const auto* x = static_cast<const Element*>(p.kv) + ((int64_t{q} * p.N + n) * p.L + l) * 2 * half;
  const auto* norm = static_cast<const Element*>(p.k_norm) + int64_t{l} * p.width;
  auto* y = static_cast<Element*>(p.cache) + row * 2 * half;
  for (int64_t g = 0; g < half; g += p.width)
    turn(x + g, norm, p.rope, p.positions, position, p.width, p.eps, y + g);
  std::copy_n(x + half, half, y + half);
}

}  // namespace

void block_append(const BlockAppendParams& p, Stream) {
  constexpr int kGrain = 32;  // nodes' layers worth a thread
  parallel_for(int64_t{p.Q} * p.J * p.L, kGrain, [&](int64_t begin, int64_t end) {
    dispatch(p.dtype, [&](auto element) {
      for (int64_t n = begin; n < end; ++n)
        append<decltype(element)>(p, static_cast<int>(n / p.L / p.J),
                                  static_cast<int>(n / p.L % p.J), static_cast<int>(n % p.L));
    });
  });
}

}  // namespace kdtree::cpu
