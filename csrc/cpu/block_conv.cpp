#include <vector>

#include "common.h"

namespace kdtree::cpu {
namespace {

// Row t, slot t % N of its block.
template <class Element>
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void convolve(const BlockConvParams& p, int t, float* sum) {
  const int share = p.D / p.groups;
  std::fill_n(sum, p.D, 0.f);
  for (int k = 0; k < p.taps && k <= t % p.N; ++k) {
    const auto* x = static_cast<const Element*>(p.x) + int64_t{t - k} * p.D;
    const auto* base = static_cast<const Element*>(p.base) + int64_t{k} * p.D;
    const auto* dynamic =
        static_cast<const Element*>(p.dynamic) + t * p.dynamic_stride + int64_t{k} * p.groups;
    for (int g = 0; g < p.groups; ++g) {
      const float more = dynamic[g];
      for (int d = g * share; d < (g + 1) * share; ++d)
        sum[d] += (float(base[d]) + more) * float(x[d]);
    }
  }
  auto* y = static_cast<Element*>(p.y) + int64_t{t} * p.D;
  for (int d = 0; d < p.D; ++d) y[d] = Element(sum[d]);
}

}  // namespace

void block_conv(const BlockConvParams& p, Stream) {
  parallel_for(p.T, 1 + (1 << 15) / (p.D + 1), [&](int64_t begin, int64_t end) {
    std::vector<float> sum(p.D);
    dispatch(p.dtype, [&](auto element) {
      for (int64_t t = begin; t < end; ++t)
        convolve<decltype(element)>(p, static_cast<int>(t), sum.data());
    });
  });
}

}  // namespace kdtree::cpu
