// Edges of one candidate fill the lanes: one sum each, in the order of R, whatever M is.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "block.h"
#include "mla.h"
#include "vocab.h"

namespace kdtree::cpu {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// log(sum of exp(x)) over M numbers; NaN where one is, or none is finite.
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
float log_sum(const float* x, int M) {
  float top = kNever;
  bool nan = false;
  for (int m = 0; m < M; ++m) {
    top = larger(top, x[m]);
    nan |= x[m] != x[m];
  }
  if (nan || !(std::abs(top) < INFINITY)) return NAN;
  float mass[kMaxNodes];
  for (int m = 0; m < M; ++m) mass[m] = exp_negative(x[m] - top);
  float sum = 0;
  for (int m = 0; m < M; ++m) sum += mass[m];
  return top + std::log(sum);
}

// edge[to] += sum over r of start[r] * after[r, to], whole lanes of `to`
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void add_products(const float* start, const float* after, int R, int width, float* edge) {
  for (int to = 0; to < width; to += kLanes)
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 1
      for (int l = 0; l < kLanes; ++l)
        edge[to + l] = std::fma(start[r], after[int64_t{r} * width + to + l], edge[to + l]);
}

// Depth j of sequence b, the `at`-th of all.
template <class Element>
class Depth {
 public:
  Depth(const EdgeScoresParams& p, int64_t at)
      : p(p),
        at(at),
        b(static_cast<int>(at / p.J)),
        j(static_cast<int>(at % p.J)),
        width(whole_lanes(p.M)),
        start(p.R),
        after(int64_t{p.R} * width) {}

  void run() {
    const float* score = p.score + at * p.M;
    const float factor = p.a[j] / (1 + p.c[j] * p.temperature[b]), mass = log_sum(score, p.M);
    for (int to = 0; to < p.M && p.direction; ++to)
      for (int r = 0; r < p.R; ++r) after[int64_t{r} * width + to] = row(p.after, at, to)[r];
    for (int m = 0; m < p.M; ++m) {
      float edge[kMaxNodes] = {};
      if (p.direction) select(m, edge);
      float* out = p.out + (at * p.M + m) * p.M;
      for (int to = 0; to < p.M; ++to) {
        const float more = p.more ? p.more[(at * p.M + m) * p.M + to] : 0;
        out[to] = score[to] + factor * (edge[to] + more);
      }
      const float shift = mass - log_sum(out, p.M);
      for (int to = 0; to < p.M; ++to)
        if (out[to] += shift; out[to] != out[to]) out[to] = kNever;
    }
  }

 private:
  // The row of candidate m of a depth; the root stands before a sequence's first.
  const Element* row(const void* table, int64_t depth, int m) const {
    const bool root = depth < int64_t{b} * p.J;
    const int64_t id = root ? root_of(p.token, p.length, p.X, b) : p.candidate[depth * p.M + m];
    return static_cast<const Element*>(table) + std::clamp<int64_t>(id, 0, p.W - 1) * p.R;
  }

  // The selector's part of the edges from candidate m.
  void select(int m, float* edge) {
    const Element* before = row(p.before, at - 1, m);
    for (int r = 0; r < p.R; ++r) start[r] = float(before[r]) * p.direction[at * p.R + r];
    add_products(start.data(), after.data(), p.R, width, edge);
    for (int to = 0; to < p.M; ++to) edge[to] *= p.weight[j];
  }

  const EdgeScoresParams& p;
  const int64_t at;
  const int b, j, width;
  std::vector<float> start;  // [R]
  std::vector<float> after;  // [R, width], zeros beyond M
};

}  // namespace

void edge_scores(const EdgeScoresParams& p, Stream) {
  parallel_for(int64_t{p.B} * p.J, 1, [&](int64_t begin, int64_t end) {
    dispatch(p.dtype, [&](auto element) {
      for (int64_t at = begin; at < end; ++at) Depth<decltype(element)>(p, at).run();
    });
  });
}

}  // namespace kdtree::cpu
