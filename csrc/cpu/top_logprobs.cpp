#include <algorithm>
#include <array>

#include "common.h"
#include "vocab.h"

namespace kdtree::cpu {
namespace {

constexpr int kMaxBest = 64;  // the op's bound on k
constexpr int kChunk = 64;

// Whether a chunk of the row holds a value that a kept one, the worst, does not beat.
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
bool any_above(const float* x, int count, float worst) {
  int above = 0;
  for (int j = 0; j < count; ++j) above |= !(x[j] <= worst);
  return above;
}

// Writes the ranks of the k best of a row, best first. Ids ascend, so an equal value never enters.
void best_of(const float* x, int W, int k, uint64_t* best) {
  for (int i = 0; i < k; ++i) best[i] = rank_of(x[i], i);
  std::sort(best, best + k, std::greater<>());
  for (int i = k; i < W; i += kChunk) {
    const int count = std::min(kChunk, W - i);
    if (!any_above(x + i, count, value_of(best[k - 1]))) continue;
    for (int j = i; j < i + count; ++j) {
      const uint64_t rank = rank_of(x[j], j);
      if (rank <= best[k - 1]) continue;
      uint64_t* place = std::upper_bound(best, best + k, rank, std::greater<>());
      std::copy_backward(place, best + k - 1, best + k);
      *place = rank;
    }
  }
}

void top_logprobs_row(const TopLogprobsParams& p, int t) {
  const float* x = p.logits + int64_t{t} * p.W;
  std::array<uint64_t, kMaxBest> best;
  best_of(x, p.W, p.k, best.data());
  const float max = row_max(x, p.W);
  const uint64_t mass = row_mass(x, p.W, max);
  for (int i = 0; i < p.k; ++i) {
    p.id[int64_t{t} * p.k + i] = id_of(best[i]);
    p.logprob[int64_t{t} * p.k + i] = logprob_of(x[id_of(best[i])], max, mass);
  }
}

}  // namespace

void top_logprobs(const TopLogprobsParams& p, Stream) {
  parallel_for(p.T, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) top_logprobs_row(p, static_cast<int>(t));
  });
}

}  // namespace kdtree::cpu
