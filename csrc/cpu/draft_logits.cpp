#include <algorithm>

#include "common.h"
#include "vocab.h"

namespace kdtree::cpu {
namespace {

// What a row's entries are weighted with.
struct Weights {
  float draft, noise;
};

Weights weights_of(const DraftLogitsParams& p, int b, int j) {
  const float temperature = p.temperature[b], below = 1 + p.c[j] * temperature;
  return {p.a[j] / below, p.b[j] * temperature / below};
}

[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void sharpen(const float* logits, int W, float max, float log_sum, float weight, float* y) {
  for (int i = 0; i < W; ++i) {
    const float logprob = logits[i] - max - log_sum;
    y[i] = logits[i] == -INFINITY ? -INFINITY : weight * logprob;
  }
}

void add_noise(Noise at, int W, float weight, float* y) {
  float noise[kNoiseWords][kNoiseBlocks];
  for (int v = 0; v < W; v += kNoiseIds) {
    gumbel(at, static_cast<uint32_t>(v / kNoiseWords), noise);
    const int count = std::min(kNoiseIds, W - v);
    for (int i = 0; i < count; ++i) y[v + i] += weight * noise[i % kNoiseWords][i / kNoiseWords];
  }
}

void draft_logits_row(const DraftLogitsParams& p, int64_t t) {
  const int b = static_cast<int>(t / p.J), j = static_cast<int>(t % p.J);
  const float* logits = p.logits + t * p.W;
  float* y = p.y + t * p.W;
  const float max = row_max(logits, p.W);
  if (!(std::abs(max) < INFINITY)) {
    std::fill(y, y + p.W, NAN);
    return;
  }
  const Weights weight = weights_of(p, b, j);
  const auto log_sum = static_cast<float>(log_of(row_mass(logits, p.W, max)));
  sharpen(logits, p.W, max, log_sum, weight.draft, y);
  const auto drawn = static_cast<uint64_t>(int64_t{p.position[b]} + 1 + j);
  if (weight.noise != 0) add_noise({static_cast<uint64_t>(p.seed[b]), drawn}, p.W, weight.noise, y);
}

}  // namespace

void draft_logits(const DraftLogitsParams& p, Stream) {
  parallel_for(int64_t{p.B} * p.J, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) draft_logits_row(p, t);
  });
}

}  // namespace kdtree::cpu
