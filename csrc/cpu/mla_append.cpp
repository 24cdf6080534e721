#include <algorithm>

#include "mla.h"

namespace kdtree::cpu {
namespace {

template <class Element>
void append_row(const MlaAppendParams& p, int64_t t) {
  if (p.slot[t] < 0 || p.slot[t] >= p.slots) return;
  const auto* x = static_cast<const Element*>(p.kv) + t * p.kv_stride;
  const auto* w = static_cast<const Element*>(p.w);
  auto* y = static_cast<Element*>(p.cache) + int64_t{p.slot[t]} * (p.C + p.R);
  double sum = 0;
  for (int c = 0; c < p.C; ++c) sum += double(x[c]) * double(x[c]);
  const double scale = 1 / std::sqrt(sum / p.C + p.eps);
  for (int c = 0; c < p.C; ++c) y[c] = Element(float(double(x[c]) * scale * double(w[c])));
  const int position = std::clamp(p.position[t], 0, p.positions - 1);
  rotate(x + p.C, p.rope + int64_t{position} * p.R, p.R, p.interleaved, y + p.C);
}

}  // namespace

void mla_append(const MlaAppendParams& p, Stream) {
  constexpr int kGrain = 16;  // rows worth a thread
  parallel_for(p.T, kGrain, [&](int64_t begin, int64_t end) {
    dispatch(p.dtype, [&](auto element) {
      for (int64_t t = begin; t < end; ++t) append_row<decltype(element)>(p, t);
    });
  });
}

}  // namespace kdtree::cpu
