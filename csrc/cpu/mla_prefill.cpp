#include <algorithm>
#include <limits>
#include <vector>

#include "mla.h"

namespace kdtree::cpu {
namespace {

// One row of one head, all in double.
template <class Element>
void prefill_row(const MlaPrefillParams& p, int64_t n, int64_t h, std::vector<double>& weight) {
  const auto* x = static_cast<const Element*>(p.q) + n * p.q_row + h * (p.P + p.R);
  const auto* k = static_cast<const Element*>(p.k) + h * p.k_head;
  const auto* v = static_cast<const Element*>(p.v) + h * p.v_head;
  const auto* k_rope = static_cast<const Element*>(p.k_rope);
  const int64_t position = p.keys - p.N + n, row = std::min<int64_t>(position, p.positions - 1);
  std::vector<Element> q(x, x + p.P + p.R);
  rotate(x + p.P, p.rope + row * p.R, p.R, p.interleaved, q.data() + p.P);

  double top = -std::numeric_limits<double>::infinity(), mass = 0;
  for (int64_t j = 0; j <= position; ++j) {
    double score = 0;
    for (int i = 0; i < p.P; ++i) score += double(q[i]) * double(k[j * p.k_row + i]);
    for (int i = 0; i < p.R; ++i)
      score += double(q[p.P + i]) * double(k_rope[j * p.rope_row + i]);
    weight[j] = score * p.scale;
    top = std::max(top, weight[j]);
  }
  for (int64_t j = 0; j <= position; ++j) mass += weight[j] = std::exp(weight[j] - top);
  auto* y = static_cast<Element*>(p.out) + (n * p.H + h) * p.V;
  for (int c = 0; c < p.V; ++c) {
    double sum = 0;
    for (int64_t j = 0; j <= position; ++j) sum += weight[j] * double(v[j * p.v_row + c]);
    y[c] = Element(float(sum / mass));
  }
}

}  // namespace

void mla_prefill(const MlaPrefillParams& p, Stream) {
  parallel_for(int64_t{p.N} * p.H, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> weight(p.keys);
    dispatch(p.dtype, [&](auto element) {
      for (int64_t i = begin; i < end; ++i)
        prefill_row<decltype(element)>(p, i / p.H, i % p.H, weight);
    });
  });
}

}  // namespace kdtree::cpu
