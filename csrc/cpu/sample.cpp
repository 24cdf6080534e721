#include <algorithm>
#include <cfloat>
#include <vector>

#include "common.h"
#include "vocab.h"

namespace kdtree::cpu {
namespace {

constexpr float kMinNoise = -2.9f, kMaxNoise = 16.7f;  // -log(-log u) for u = 2^-24 .. 1 - 2^-24

struct Drawn {
  int64_t token;
  float logprob;
  bool finite;
};

// logit / temperature, kept finite where a tiny temperature would overflow; -inf stays.
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void scale(const float* x, int W, float temperature, float* scaled) {
  for (int i = 0; i < W; ++i) {
    float y = x[i] / temperature;
    y = y > FLT_MAX ? FLT_MAX : y;
    y = y < -FLT_MAX ? -FLT_MAX : y;
    scaled[i] = x[i] == -INFINITY ? -INFINITY : y;
  }
}

[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
float chunk_max(const float* x) {
  constexpr int kLanes = 16;
  float best[kLanes];
  for (int j = 0; j < kLanes; ++j) best[j] = x[j];
  for (int i = kLanes; i < kNoiseIds; i += kLanes)
    for (int j = 0; j < kLanes; ++j) best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) best[j] = best[j + width] > best[j] ? best[j + width] : best[j];
  return best[0];
}

// argmax of scaled + noise, ties to the lower id. Rounding is monotone, so a chunk whose maximum
// plus the greatest noise stays under a score that some id surely reaches holds no winner.
int argmax_noisy(const std::vector<float>& scaled, float max, Noise at) {
  float sure = max + kMinNoise, best = -INFINITY;
  int token = -1;
  for (size_t v = 0; v < scaled.size(); v += kNoiseIds) {
    if (chunk_max(&scaled[v]) + kMaxNoise < sure) continue;
    float noise[kNoiseWords][kNoiseBlocks];
    gumbel(at, static_cast<uint32_t>(v / kNoiseWords), noise);
    for (int i = 0; i < kNoiseIds; ++i) {
      const float score = scaled[v + i] + noise[i % kNoiseWords][i / kNoiseWords];
      if (score > best) best = score, token = static_cast<int>(v) + i;
    }
    sure = std::max(sure, best);
  }
  return token;
}

// Moves the best of ranks to the front, down to the one whose weight makes the sum reach target,
// and cuts off the others.
template <class Weight>
void keep_best(std::vector<uint64_t>& ranks, uint64_t target, Weight weight) {
  auto low = ranks.begin(), high = ranks.end();  // the last one to keep is in low .. high - 1
  while (high - low > 1) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high, std::greater<>());
    uint64_t sum = 0;
    for (auto r = low; r != middle; ++r) sum += weight(*r);
    if (sum >= target) {
      high = middle;
    } else {
      target -= sum;
      low = middle;
    }
  }
  ranks.resize(low - ranks.begin() + 1);
}

// Sets every id that the filters drop to -inf. max = the largest of scaled.
void filter(std::vector<float>& scaled, int W, float max, int top_k, float top_p, float min_p) {
  const bool by_rank = top_k > 0 && top_k < W, by_mass = top_p < 1;
  if (by_rank || by_mass) {
    std::vector<uint64_t> ranks(W);
    for (int i = 0; i < W; ++i) ranks[i] = rank_of(scaled[i], i);
    if (by_rank) keep_best(ranks, top_k, [](uint64_t) { return 1; });
    if (by_mass) {
      const auto mass = [max](uint64_t rank) { return mass_of(value_of(rank) - max); };
      uint64_t total = 0;
      for (const uint64_t rank : ranks) total += mass(rank);
      const double target = std::ceil(double(top_p) * static_cast<double>(total));
      keep_best(ranks, std::min(total, static_cast<uint64_t>(std::max(target, 1.))), mass);
    }
    std::vector<float> kept(scaled.size(), -INFINITY);
    for (const uint64_t rank : ranks) kept[id_of(rank)] = scaled[id_of(rank)];
    scaled.swap(kept);
  }
  if (min_p > 0) {
    for (float& x : scaled)
      if (exp_negative(x - max) < std::min(min_p, 1.f)) x = -INFINITY;
  }
}

Drawn draw(const SampleParams& p, int64_t t, int32_t position) {
  const int b = static_cast<int>(t / p.N);
  const float *x = p.logits + t * p.W, *raw = p.raw + t * p.W;
  const float max = row_max(x, p.W), raw_max = raw == x ? max : row_max(raw, p.W);
  if (!(std::abs(max) < INFINITY && std::abs(raw_max) < INFINITY)) return {-1, 0, false};

  const float temperature = p.temperature[b];
  int token;
  if (temperature > 0) {
    std::vector<float> scaled((p.W + kNoiseIds - 1) / kNoiseIds * int64_t{kNoiseIds}, -INFINITY);
    scale(x, p.W, temperature, scaled.data());
    const float best = row_max(scaled.data(), p.W);
    filter(scaled, p.W, best, p.top_k[b], p.top_p[b], p.min_p[b]);
    const auto next = static_cast<uint64_t>(int64_t{position} + 1);
    token = argmax_noisy(scaled, best, {static_cast<uint64_t>(p.seed[b]), next});
  } else {
    token = static_cast<int>(std::find(x, x + p.W, max) - x);
  }
  return {token, logprob_of(raw[token], raw_max, row_mass(raw, p.W, raw_max)), true};
}

}  // namespace

void sample(const SampleParams& p, Stream) {
  parallel_for(int64_t{p.B} * p.N, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t position = p.position[t];
      const Drawn drawn = position < 0 ? Drawn{-1, 0, true} : draw(p, t, position);
      p.token[t] = drawn.token;
      p.logprob[t] = drawn.logprob;
      p.finite[t] = drawn.finite;
    }
  });
}

}  // namespace kdtree::cpu
