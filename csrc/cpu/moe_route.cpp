#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common.h"

namespace kdtree::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// NaN counts as -inf wherever a choice is made.
float or_lowest(float c) { return c == c ? c : kLowest; }

// With e = exp(-|x|) nothing overflows and small scores keep their precision.
float sigmoid(float x) {
  const double e = std::exp(-std::fabs(double{x}));
  return static_cast<float>(x >= 0 ? 1 / (1 + e) : e / (1 + e));
}

void softmax(const float* logits, int E, float* s) {
  const float top = *std::max_element(logits, logits + E);
  double sum = 0;
  for (int e = 0; e < E; ++e) sum += std::exp(double{logits[e]} - double{top});
  for (int e = 0; e < E; ++e)
    s[e] = static_cast<float>(std::exp(double{logits[e]} - double{top}) / sum);
}

float group_score(const float* c, int size, bool sum2) {
  float best = kLowest, second = kLowest;
  for (int i = 0; i < size; ++i) {
    second = std::max(second, std::min(best, c[i]));
    best = std::max(best, c[i]);
  }
  return or_lowest(sum2 && size > 1 ? best + second : best);
}

// The best of value[i] with open[i], the lowest i of a tie, which is closed; there must be one.
int take_best(const float* value, std::vector<char>& open) {
  int best = -1;
  for (int i = 0; i < static_cast<int>(open.size()); ++i)
    if (open[i] && (best < 0 || value[i] > value[best])) best = i;
  open[best] = false;
  return best;
}

struct Row {
  std::vector<float> score, choice, group;
  std::vector<char> open, open_group;
};

void route(const MoeRouteParams& p, int t, Row& row) {
  const float* logits = p.logits + int64_t{t} * p.E;
  int32_t* ids = p.ids + int64_t{t} * p.K;
  float* weights = p.weights + int64_t{t} * p.K;
  if (p.position && p.position[t] < 0) {
    std::fill_n(ids, p.K, -1);
    std::fill_n(weights, p.K, 0.0f);
    return;
  }

  if (p.scoring == Scoring::softmax)
    softmax(logits, p.E, row.score.data());
  else
    std::transform(logits, logits + p.E, row.score.begin(), sigmoid);
  for (int e = 0; e < p.E; ++e)
    row.choice[e] = or_lowest(p.bias ? row.score[e] + p.bias[e] : row.score[e]);

  // Experts outside the kept groups are closed, not -inf: even a row of nothing but -inf must not
  // choose one.
  const int size = p.E / p.groups;
  for (int g = 0; g < p.groups; ++g)
    row.group[g] = group_score(&row.choice[g * size], size, p.group_sum2);
  row.open_group.assign(p.groups, true);
  row.open.assign(p.E, false);
  for (int i = 0; i < p.kept_groups; ++i)
    std::fill_n(row.open.begin() + take_best(row.group.data(), row.open_group) * size, size, true);

  float sum = 0;
  for (int k = 0; k < p.K; ++k) {
    ids[k] = take_best(row.choice.data(), row.open);
    weights[k] = row.score[ids[k]];
    sum += weights[k];
  }
  for (int k = 0; k < p.K; ++k)
    weights[k] = (p.normalize ? weights[k] / (sum + 1e-20f) : weights[k]) * p.scale;
}

}  // namespace

void moe_route(const MoeRouteParams& p, Stream) {
  parallel_for(p.T, 1, [&](int64_t begin, int64_t end) {
    Row row{.score = std::vector<float>(p.E),
            .choice = std::vector<float>(p.E),
            .group = std::vector<float>(p.groups),
            .open = {},
            .open_group = {}};
    for (int64_t t = begin; t < end; ++t) route(p, static_cast<int>(t), row);
  });
}

}  // namespace kdtree::cpu
