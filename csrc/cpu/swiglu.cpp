#include <cmath>

#include "common.h"

namespace kdtree::cpu {

template <class Element>
static void swiglu(const SwigluParams& p) {
  const int64_t grain = 1 + (1 << 12) / (p.F + 1);  // rows that are worth waking a thread for
  parallel_for(p.T, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const auto* gate = static_cast<const Element*>(p.x) + t * 2 * p.F;
      const auto* up = gate + p.F;
      auto* y = static_cast<Element*>(p.y) + t * p.F;
      for (int f = 0; f < p.F; ++f) {
        const float g = gate[f];
        y[f] = Element(g / (1 + std::exp(-g)) * float(up[f]));  // exp = inf makes it -0
      }
    }
  });
}

void swiglu(const SwigluParams& p, Stream) {
  dispatch(p.dtype, [&](auto element) { swiglu<decltype(element)>(p); });
}

}  // namespace kdtree::cpu
