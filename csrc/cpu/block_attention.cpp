// The query heads of a key head, of all slots of a block, share every key and value, widened once,
// and fill the lanes. A row's own sums do not depend on which rows those are: scores over lanes,
// weights and values in the order of the keys. Scores are in units of log2 e, so that exp is exp2.
#include <algorithm>
#include <limits>
#include <vector>

#include "mla.h"

namespace kdtree::cpu {
namespace {

constexpr int kRows = 4;  // queries whose scores are summed at once
constexpr float kHidden = -std::numeric_limits<float>::infinity();  // the score of a key not seen
constexpr float kLog2E = 1.442695041f;

// score[r] = key . q[r]; a whole number of kRows queries, width a whole number of lanes.
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void score_key(const float* key, const float* q, int rows, int width, float* score) {
  for (int r = 0; r < rows; r += kRows) dots<kRows>(key, q + int64_t{r} * width, width, score + r);
}

// Scores [keys, rows] become weights, 2^(scale * score - top) of the row; rows in whole lanes. sum:
// their sums, in double since there may be many.
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void weigh(float* score, int keys, int rows, float scale, double* sum) {
  for (int r = 0; r < rows; r += kLanes) {
    Lanes top;
#pragma GCC unroll 1
    for (int l = 0; l < kLanes; ++l) top[l] = kHidden;
    for (int j = 0; j < keys; ++j)
#pragma GCC unroll 1
      for (int l = 0; l < kLanes; ++l) {
        float& s = score[int64_t{j} * rows + r + l];
        s *= scale;
        top[l] = larger(top[l], s);
      }
    for (int j = 0; j < keys; ++j) {
      float* weight = score + int64_t{j} * rows + r;
#pragma GCC unroll 1
      for (int l = 0; l < kLanes; ++l) weight[l] = exp2_negative(weight[l] - top[l]);
#pragma GCC unroll 1
      for (int l = 0; l < kLanes; ++l) sum[r + l] += weight[l];
    }
  }
}

// acc[r] += weight[r] * value
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void add_value(const float* value, const float* weight, int rows, int width, float* acc) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < width; c += kLanes)
#pragma GCC unroll 1
      for (int l = 0; l < kLanes; ++l) {
        float& sum = acc[int64_t{r} * width + c + l];
        sum = std::fma(weight[r], value[c + l], sum);
      }
}

template <class Element>
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void widen_row(const Element* x, int n, float* wide) {
  widen(x, n, wide);
}

// One key head of one sequence. Row r is slot r / group, query head g * group + r % group.
template <class Element>
class Head {
 public:
  Head(const BlockAttentionParams& p, int b, int g)
      : p(p),
        b(b),
        g(g),
        group(p.H / p.kv_heads),
        rows(p.N * group),
        padded(whole_lanes(rows)),
        width(whole_lanes(p.width)),
        length(std::clamp(p.length[b], 0, p.window ? std::numeric_limits<int>::max() : p.S)),
        first(p.window ? std::max(length - p.window + 1, 0) : 0),
        keys(length - first + p.N),
        q(int64_t{padded} * width),
        acc(int64_t{padded} * width),
        wide(width),
        score(int64_t{keys} * padded),
        sum(padded) {}

  void run() {
    for (int r = 0; r < rows; ++r) widen_row(query(p.q, r), p.width, &q[int64_t{r} * width]);
    for (int j = 0; j < keys; ++j) {
      widen_row(row(p.k, p.cache_k, j), p.width, wide.data());
      score_key(wide.data(), q.data(), padded, width, &score[int64_t{j} * padded]);
    }
    if (p.window || p.causal) hide();
    weigh(score.data(), keys, padded, p.scale * kLog2E, sum.data());
    for (int j = 0; j < keys; ++j) {
      widen_row(row(p.v, p.cache_v, j), p.width, wide.data());
      add_value(wide.data(), &score[int64_t{j} * padded], rows, width, acc.data());
    }
    for (int r = 0; r < rows; ++r) {
      auto* out = const_cast<Element*>(query(p.out, r));
      for (int c = 0; c < p.width; ++c) {
        out[c] = Element(acc[int64_t{r} * width + c] / static_cast<float>(sum[r]));
      }
    }
  }

 private:
  const Element* query(const void* base, int r) const {
    const int64_t slot = int64_t{b} * p.N + r / group;
    return static_cast<const Element*>(base) + (slot * p.H + g * group + r % group) * p.width;
  }

  // Key or value j: the cached ones in order of position, then the block's.
  const Element* row(const void* block, const void* cache, int j) const {
    const bool cached = first + j < length;
    const int64_t at =
        cached ? int64_t{b} * p.S + (first + j) % p.S : int64_t{b} * p.N + (first + j - length);
    return static_cast<const Element*>(cached ? cache : block) + (at * p.kv_heads + g) * p.width;
  }

  bool visible(int slot, int j) const {
    const int other = first + j - length;  // its slot; a cached one's is negative
    if (p.window && std::abs(slot - other) >= p.window) return false;
    return !p.causal || other <= slot;
  }

  void hide() {
    for (int j = 0; j < keys; ++j)
      for (int r = 0; r < rows; ++r)
        if (!visible(r / group, j)) score[int64_t{j} * padded + r] = kHidden;
  }

  const BlockAttentionParams& p;
  const int b, g, group, rows, padded, width, length, first, keys;
  std::vector<float> q, acc;  // [padded, width]
  std::vector<float> wide;    // [width]
  std::vector<float> score;   // [keys, padded]
  std::vector<double> sum;    // [padded]
};

}  // namespace

void block_attention(const BlockAttentionParams& p, Stream) {
  parallel_for(int64_t{p.B} * p.kv_heads, 1, [&](int64_t begin, int64_t end) {
    dispatch(p.dtype, [&](auto element) {
      for (int64_t i = begin; i < end; ++i)
        Head<decltype(element)>(p, static_cast<int>(i / p.kv_heads),
                                static_cast<int>(i % p.kv_heads))
            .run();
    });
  });
}

}  // namespace kdtree::cpu
