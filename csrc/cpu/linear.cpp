#include <algorithm>

#include "dot.h"

namespace kdtree::cpu {

// One task is a block of rows against a block of outputs. Tasks that share weights are neighbours.
template <class X, class W, class Y>
static void linear(const LinearParams& p) {
  const int64_t row_blocks = (p.T + kDotRows - 1) / kDotRows;
  const int64_t output_blocks = (p.O + kDotOutputs - 1) / kDotOutputs;
  constexpr int64_t kGrain = 1 << 18;  // products that are worth waking a thread for
  const int64_t task = int64_t{kDotOutputs} * std::min(p.T, kDotRows) * std::max(p.I, 1);
  parallel_for(p.G * output_blocks * row_blocks, std::max<int64_t>(1, kGrain / task),
               [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t t0 = n % row_blocks * kDotRows, n_outputs = n / row_blocks;
      const int64_t o0 = n_outputs % output_blocks * kDotOutputs, g = n_outputs / output_blocks;
      const int rows = std::min<int64_t>(kDotRows, p.T - t0);
      const int outputs = std::min<int64_t>(kDotOutputs, p.O - o0);
      const X* x[kDotRows];
      for (int r = 0; r < rows; ++r)
        x[r] = static_cast<const X*>(p.x) + (t0 + r) * p.x_row + g * p.x_group;
      const W* w = static_cast<const W*>(p.w) + (g * p.O + o0) * p.I;
      float sum[kDotRows][kDotOutputs];
      dot(x, rows, w, p.I, outputs, p.I, sum);
      for (int r = 0; r < rows; ++r) {
        Y* y = static_cast<Y*>(p.y) + ((t0 + r) * p.G + g) * p.O + o0;
        for (int o = 0; o < outputs; ++o) y[o] = Y(sum[r][o]);
      }
    }
  });
}

void linear(const LinearParams& p, Stream) {
  dispatch(p.x_dtype, [&](auto x) {
    using X = decltype(x);
    dispatch(p.y_dtype, [&](auto y) {
      using Y = decltype(y);
      if (p.w_dtype == p.x_dtype) return linear<X, X, Y>(p);
      linear<X, float, Y>(p);
    });
  });
}

}  // namespace kdtree::cpu
