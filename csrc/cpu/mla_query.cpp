#include <algorithm>
#include <vector>

#include "mla.h"

namespace kdtree::cpu {
namespace {

constexpr int kRows = 32;     // rows that share one pass over a head's weights
constexpr int kInFlight = 8;  // rows whose sums are in flight

// out[r, c] = w[c] . q[r]: the nope parts of one head's rows absorbed by w [C, P].
template <class Element>
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void absorb(const Element* const* q, int rows, const Element* w, int C, int P, float* scratch,
            Element* const* out) {
  const int width = whole_lanes(P);
  float* wide_w = scratch + int64_t{kRows} * width;
  for (int r = 0; r < rows; ++r) widen(q[r], P, scratch + int64_t{r} * width);
  for (int c = 0; c < C; ++c) {
    widen(w + int64_t{c} * P, P, wide_w);
    float y[kRows];
    int r = 0;
    for (; r + kInFlight <= rows; r += kInFlight)
      dots<kInFlight>(wide_w, scratch + int64_t{r} * width, width, y + r);
    for (; r < rows; ++r) dots<1>(wide_w, scratch + int64_t{r} * width, width, y + r);
    for (r = 0; r < rows; ++r) out[r][c] = Element(y[r]);
  }
}

// One head of the rows from `begin` on, at most kRows of them.
template <class Element>
void query_block(const MlaQueryParams& p, int begin, int h, float* scratch) {
  const Element* q[kRows];
  Element* out[kRows];
  int rows = 0;
  for (int t = begin; t < std::min(begin + kRows, p.T); ++t) {
    auto* y = static_cast<Element*>(p.out) + (int64_t{t} * p.H + h) * (p.C + p.R);
    const auto* x = static_cast<const Element*>(p.q) + t * p.q_stride + int64_t{h} * (p.P + p.R);
    if (p.position[t] < 0) {
      std::fill_n(y, p.C + p.R, Element(0));
      continue;
    }
    const int position = std::min(p.position[t], p.positions - 1);
    rotate(x + p.P, p.rope + int64_t{position} * p.R, p.R, p.interleaved, y + p.C);
    q[rows] = x;
    out[rows++] = y;
  }
  const auto* w = static_cast<const Element*>(p.w_uk) + int64_t{h} * p.C * p.P;
  if (rows > 0) absorb<Element>(q, rows, w, p.C, p.P, scratch, out);
}

}  // namespace

void mla_query(const MlaQueryParams& p, Stream) {
  const int blocks = (p.T + kRows - 1) / kRows;
  parallel_for(int64_t{blocks} * p.H, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(int64_t{kRows + 1} * whole_lanes(p.P));
    dispatch(p.dtype, [&](auto element) {
      for (int64_t i = begin; i < end; ++i)
        query_block<decltype(element)>(p, static_cast<int>(i / p.H) * kRows,
                                       static_cast<int>(i % p.H), scratch.data());
    });
  });
}

}  // namespace kdtree::cpu
