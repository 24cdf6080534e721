#include <algorithm>

#include "dot.h"

namespace kdtree::cpu {
namespace {

// The rows from t0 on, up to kDotRows, of group g against the outputs from o0 on, up to
// kDotOutputs.
template <class X, class W, class Y>
void linear_block(const LinearParams& p, int64_t t0, int64_t g, int64_t o0) {
  const int rows = std::min<int64_t>(kDotRows, p.T - t0);
  const int outputs = std::min<int64_t>(kDotOutputs, p.O - o0);
  const X* x[kDotRows] = {};
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

template <class X, class W, class Y>
void linear(const LinearParams& p) {
  const int64_t row_blocks = (p.T + kDotRows - 1) / kDotRows;
  const int64_t output_blocks = (p.O + kDotOutputs - 1) / kDotOutputs;
  constexpr int64_t kGrain = 1 << 18;  // products that are worth waking a thread for
  const int64_t block = int64_t{kDotOutputs} * std::min(p.T, kDotRows) * std::max(p.I, 1);
  const int64_t grain = std::max<int64_t>(1, kGrain / block);
  parallel_for(p.G * output_blocks * row_blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {  // blocks that share weights are neighbours
      const int64_t go = n / row_blocks;
      linear_block<X, W, Y>(p, n % row_blocks * kDotRows, go / output_blocks,
                            go % output_blocks * kDotOutputs);
    }
  });
}

}  // namespace

void linear(const LinearParams& p, Stream) {
  dispatch(p.x_dtype, [&](auto x) {
    dispatch(p.w_dtype, [&](auto w) {
      dispatch(p.y_dtype, [&](auto y) { linear<decltype(x), decltype(w), decltype(y)>(p); });
    });
  });
}

}  // namespace kdtree::cpu
