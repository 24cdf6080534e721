// The RMS norm of one row, for the ops that norm.
#pragma once

#include <cmath>

#include "common.h"

namespace kdtree::cpu {

// y = x / sqrt(mean(x^2) + eps) * w over D features. In double, so that a row's sum of squares may be
// long; in lanes, so that it is vectorised in an order that follows from D alone. Inlined into a
// function with target_clones.
template <class Element>
[[gnu::always_inline]] inline void norm_row(const Element* x, const Element* w, Element* y, int D,
                                            float eps) {
  constexpr int kLanes = 8;
  double sum[kLanes] = {};
  const int whole = D / kLanes * kLanes;
  for (int d = 0; d < whole; d += kLanes)
#pragma GCC unroll 1
    for (int l = 0; l < kLanes; ++l) {
      const float a = x[d + l];
      sum[l] += double(a) * a;  // the product of two floats is exact
    }
  for (int d = whole; d < D; ++d) sum[d - whole] += double(x[d]) * x[d];
  for (int l = 1; l < kLanes; ++l) sum[0] += sum[l];
  const double scale = 1 / std::sqrt(sum[0] / D + eps);
  for (int d = 0; d < D; ++d) y[d] = Element(float(float(x[d]) * scale * float(w[d])));
}

// Rows a thread should take at least.
inline int64_t norm_grain(int D) { return 1 + (1 << 14) / (D + 1); }

}  // namespace kdtree::cpu
