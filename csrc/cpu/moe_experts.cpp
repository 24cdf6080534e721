#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "dot.h"
#include "int4.h"

namespace kdtree::cpu {
namespace {

constexpr int kTile = 32;  // outputs of a task
constexpr int kRows = 8;   // rows that share one pass over a task's weights
static_assert(kTile == kInt4Tile && kTile % kDotOutputs == 0);
static_assert(kRows == kInt4Rows && kRows == kDotRows);

using Tile = float[kTile];

// A bank [E, O, I] of plain matrices, and the rows that it multiplies.
template <class Element>
struct PlainBank {
  const Element* w;
  int64_t O;
  int I;
  const Element* x = nullptr;
  int64_t x_stride = 0;

  void set_rows(const Element* rows, int64_t stride, int64_t) { x = rows, x_stride = stride; }

  // y[r][o] = x[row[r]] . w[expert, first + o]
  void multiply(int expert, int first, int outputs, const int64_t* row, int rows, Tile* y) const {
    const Element* in[kRows];
    for (int r = 0; r < rows; ++r) in[r] = x + row[r] * x_stride;
    for (int o = 0; o < outputs; o += kDotOutputs) {
      float part[kRows][kDotOutputs];
      const int count = std::min(kDotOutputs, outputs - o);
      dot(in, rows, w + (expert * O + first + o) * I, I, count, I, part);
      for (int r = 0; r < rows; ++r) std::copy_n(part[r], count, y[r] + o);
    }
  }
};

// The same of an INT4 bank [E, O / 32, I / 32, 128], which multiplies arranged rows.
template <class Element>
struct Int4Bank {
  const int32_t* w;
  const Element* scale;
  int64_t O;
  int I;
  std::unique_ptr<float[]> x = nullptr;

  void set_rows(const Element* rows, int64_t stride, int64_t count) {
    x = std::make_unique_for_overwrite<float[]>(count * int4_arranged(I));
    parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        int4_arrange(rows + r * stride, I, &x[r * int4_arranged(I)]);
    });
  }

  void multiply(int expert, int first, int, const int64_t* row, int rows, Tile* y) const {
    const float* in[kRows];
    for (int r = 0; r < rows; ++r) in[r] = &x[row[r] * int4_arranged(I)];
    const int64_t tile = (expert * O + first) / kTile * (I / kInt4Tile);
    int4_product(w + tile * kInt4Words, scale + tile * kInt4Tile, in, rows, I, y);
  }
};

// The pairs t * K + k of each expert that has any: pair[begin .. end - 1], in order.
struct Run {
  int expert;
  int64_t begin, end;
};

struct Plan {
  std::vector<int64_t> pair;
  std::vector<Run> runs;
};

Plan plan(const MoeExpertsParams& p) {
  const auto used = [&](int64_t i) { return p.ids[i] >= 0 && p.ids[i] < p.E; };
  std::vector<int64_t> end(p.E + 1);
  for (int64_t i = 0; i < int64_t{p.T} * p.K; ++i)
    if (used(i)) ++end[p.ids[i] + 1];
  std::partial_sum(end.begin(), end.end(), end.begin());
  Plan out{.pair = std::vector<int64_t>(end[p.E]), .runs = {}};
  for (int e = 0; e < p.E; ++e)
    if (end[e] < end[e + 1]) out.runs.push_back({e, end[e], end[e + 1]});
  for (int64_t i = 0; i < int64_t{p.T} * p.K; ++i)
    if (used(i)) out.pair[end[p.ids[i]]++] = i;
  return out;
}

// Calls f(expert, first output, outputs, pairs, count <= kRows) over every expert's pairs and tiles
// of O outputs, in parallel over (expert, tile), so that a thread reads a tile's weights from
// memory once.
template <class F>
void for_tiles(const Plan& plan, int O, F&& f) {
  const int64_t tiles = (O + kTile - 1) / kTile;
  parallel_for(static_cast<int64_t>(plan.runs.size()) * tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const Run& run = plan.runs[task / tiles];
      const int first = static_cast<int>(task % tiles) * kTile;
      for (int64_t i = run.begin; i < run.end; i += kRows)
        f(run.expert, first, std::min(kTile, O - first), &plan.pair[i],
          static_cast<int>(std::min<int64_t>(kRows, run.end - i)));
    }
  });
}

float silu(float x) { return static_cast<float>(x / (1 + std::exp(-double{x}))); }

// sum[d] = sum over k in order of weights[k] * partial[k, d]
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void weighted_sum(const float* partial, const float* weights, const int32_t* ids, int E, int K,
                  int D, float* sum) {
  for (int d = 0; d < D; ++d) sum[d] = 0;
  for (int k = 0; k < K; ++k) {
    if (ids[k] < 0 || ids[k] >= E) continue;
    const float* in = partial + int64_t{k} * D;
    for (int d = 0; d < D; ++d) sum[d] = __builtin_fmaf(weights[k], in[d], sum[d]);
  }
}

template <class Element, class Bank>
void moe_experts(const MoeExpertsParams& p, Bank gate_up, Bank down) {
  const Plan pairs = plan(p);
  auto* hidden = static_cast<Element*>(p.hidden);
  gate_up.set_rows(static_cast<const Element*>(p.x), p.x_stride, p.T);
  for_tiles(pairs, p.F, [&](int expert, int first, int outputs, const int64_t* pair, int rows) {
    int64_t token[kRows];
    for (int r = 0; r < rows; ++r) token[r] = pair[r] / p.K;
    Tile gate[kRows], up[kRows];
    gate_up.multiply(expert, first, outputs, token, rows, gate);
    gate_up.multiply(expert, p.F + first, outputs, token, rows, up);
    for (int r = 0; r < rows; ++r)
      for (int o = 0; o < outputs; ++o)
        hidden[pair[r] * p.F + first + o] = Element(silu(gate[r][o]) * up[r][o]);
  });

  down.set_rows(hidden, p.F, int64_t{p.T} * p.K);
  for_tiles(pairs, p.D, [&](int expert, int first, int outputs, const int64_t* pair, int rows) {
    Tile out[kRows];
    down.multiply(expert, first, outputs, pair, rows, out);
    for (int r = 0; r < rows; ++r) std::copy_n(out[r], outputs, p.partial + pair[r] * p.D + first);
  });

  parallel_for(p.T, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(p.D);
    for (int64_t t = begin; t < end; ++t) {
      weighted_sum(p.partial + t * p.K * p.D, p.weights + t * p.K, p.ids + t * p.K, p.E, p.K, p.D,
                   sum.data());
      const auto* shared = p.shared ? static_cast<const Element*>(p.shared) + t * p.D : nullptr;
      for (int d = 0; d < p.D; ++d)
        static_cast<Element*>(p.y)[t * p.D + d] =
            Element(shared ? sum[d] + float(shared[d]) : sum[d]);
    }
  });
}

}  // namespace

void moe_experts(const MoeExpertsParams& p, Stream) {
  dispatch(p.dtype, [&](auto element) {
    using Element = decltype(element);
    if (p.gate_up_scale) {
      using Bank = Int4Bank<Element>;
      moe_experts<Element, Bank>(
          p,
          {static_cast<const int32_t*>(p.gate_up), static_cast<const Element*>(p.gate_up_scale),
           2 * int64_t{p.F}, p.D},
          {static_cast<const int32_t*>(p.down), static_cast<const Element*>(p.down_scale), p.D,
           p.F});
    } else {
      using Bank = PlainBank<Element>;
      moe_experts<Element, Bank>(p, {static_cast<const Element*>(p.gate_up), 2 * int64_t{p.F}, p.D},
                                 {static_cast<const Element*>(p.down), p.D, p.F});
    }
  });
}

}  // namespace kdtree::cpu
