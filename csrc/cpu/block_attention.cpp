// The query heads of a key head, of all slots of a block, share every key and value, widened once,
// and fill the lanes. A row's own sums do not depend on which rows those are: scores in the order of
// the features, weights and values in that of the keys. Scores are in units of log2 e, so that exp is
// exp2.
// The block's queries and keys are normed and rotated as they are read, in float32.
#include <algorithm>
#include <limits>
#include <vector>

#include "block.h"
#include "mla.h"

namespace kdtree::cpu {
namespace {

constexpr int kTile = 8;                                            // values that are added at once
constexpr float kHidden = -std::numeric_limits<float>::infinity();  // the score of a key not seen
constexpr float kLog2E = 1.442695041f;

// score[r] = key . q[:, r]; rows in whole lanes.
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void score_key(const float* key, const float* q, int rows, int width, float* score) {
  for (int r = 0; r < rows; r += kLanes) {
    Lanes even = {}, odd = {};  // of the features, so that two sums are in flight
#pragma GCC unroll 1
    for (int c = 0; c < width; c += 2) {
      const float* x = q + int64_t{c} * rows + r;
#pragma GCC unroll 1
      for (int l = 0; l < kLanes; ++l) even[l] = std::fma(key[c], x[l], even[l]);
#pragma GCC unroll 1
      for (int l = 0; l < kLanes; ++l) odd[l] = std::fma(key[c + 1], x[rows + l], odd[l]);
    }
#pragma GCC unroll 1
    for (int l = 0; l < kLanes; ++l) score[r + l] = even[l] + odd[l];
  }
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

// acc[r] += sum over `count` keys in order of weight[key, r] * value[key]; weights of a key stand
// `padded` apart, width in whole lanes.
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void add_values(const float* value, const float* weight, int count, int rows, int padded, int width,
                float* acc) {
#pragma GCC unroll 1
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 1
    for (int c = 0; c < width; c += kLanes) {
      Lanes sum;
      float* total = acc + int64_t{r} * width + c;
#pragma GCC unroll 1
      for (int l = 0; l < kLanes; ++l) sum[l] = total[l];
#pragma GCC unroll 1
      for (int j = 0; j < count; ++j) {
        const float w = weight[int64_t{j} * padded + r];
#pragma GCC unroll 1
        for (int l = 0; l < kLanes; ++l)
          sum[l] = std::fma(w, value[int64_t{j} * width + c + l], sum[l]);
      }
#pragma GCC unroll 1
      for (int l = 0; l < kLanes; ++l) total[l] = sum[l];
    }
}

template <class Element>
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void widen_row(const Element* x, int n, float* wide) {
  widen(x, n, wide);
}

template <class Element>
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void turn_row(const BlockAttentionParams& p, const Element* x, const void* norm, int64_t position,
              float* wide) {
  turn(x, static_cast<const Element*>(norm), p.rope, p.positions, position, p.width, p.eps, wide);
}

// One key head of one sequence. Row r is slot r / group, query head g * group + r % group.
template <class Element>
class Head {
 public:
  Head(const BlockAttentionParams& p, int b, int g)
      : p(p),
        b(b),
        g(g),
        group(p.H / p.G),
        rows(p.N * group),
        padded(whole_lanes(rows)),
        width(whole_lanes(p.width)),
        length(std::clamp(p.length[b], 0, p.window ? std::numeric_limits<int>::max() : p.S)),
        first(p.window ? std::max(length - p.window + 1, 0) : 0),
        keys(length - first + p.N),
        q(int64_t{p.width} * padded),
        acc(int64_t{rows} * width),
        wide(int64_t{kTile} * width),
        score(int64_t{keys} * padded),
        sum(padded) {}

  void run() {
    for (int r = 0; r < rows; ++r) {
      turn_row(p, projected(r / group, g * group + r % group), p.q_norm, position(r / group),
               wide.data());
      for (int c = 0; c < p.width; ++c) q[int64_t{c} * padded + r] = wide[c];
    }
    for (int j = 0; j < keys; ++j) {
      if (const int slot = slot_of(j); slot < 0)
        widen_row(cached(j, 0), p.width, wide.data());
      else
        turn_row(p, projected(slot, p.H + g), p.k_norm, position(slot), wide.data());
      score_key(wide.data(), q.data(), padded, p.width, &score[int64_t{j} * padded]);
    }
    if (p.window || p.causal) hide();
    weigh(score.data(), keys, padded, p.scale * kLog2E, sum.data());
    for (int j = 0, count; j < keys; j += count) {
      count = std::min(kTile, keys - j);
      for (int i = 0; i < count; ++i) {
        const int slot = slot_of(j + i);
        const Element* v = slot < 0 ? cached(j + i, 1) : projected(slot, p.H + p.G + g);
        widen_row(v, p.width, &wide[int64_t{i} * width]);
      }
      add_values(wide.data(), &score[int64_t{j} * padded], count, rows, padded, width, acc.data());
    }
    for (int r = 0; r < rows; ++r) {
      const int64_t row = (int64_t{b} * p.N + r / group) * p.H + g * group + r % group;
      Element* out = static_cast<Element*>(p.out) + row * p.width;
      for (int c = 0; c < p.width; ++c) {
        out[c] = Element(acc[int64_t{r} * width + c] / static_cast<float>(sum[r]));
      }
    }
  }

 private:
  // Key or value j: the cached ones in order of position, then the block's, whose slot is not
  // negative.
  int slot_of(int j) const { return first + j - length; }

  // As the rotation takes it: of a length beyond the cache, too.
  int64_t position(int slot) const { return int64_t{std::max(p.length[b], 0)} + slot; }

  const Element* projected(int slot, int head) const {
    const int64_t row = (int64_t{b} * p.N + slot) * (p.H + 2 * p.G) + head;
    return static_cast<const Element*>(p.qkv) + row * p.width;
  }

  // which: 0 for the key, 1 for the value
  const Element* cached(int j, int which) const {
    const int64_t row = int64_t{b} * p.S + (first + j) % p.S;
    return static_cast<const Element*>(p.cache) + ((row * 2 + which) * p.G + g) * p.width;
  }

  bool visible(int slot, int other) const {
    if (p.window && std::abs(slot - other) >= p.window) return false;
    return !p.causal || other <= slot;
  }

  void hide() {
    for (int j = 0; j < keys; ++j)
      for (int r = 0; r < rows; ++r)
        if (!visible(r / group, slot_of(j))) score[int64_t{j} * padded + r] = kHidden;
  }

  const BlockAttentionParams& p;
  const int b, g, group, rows, padded, width, length, first, keys;
  std::vector<float> q;      // [p.width, padded]
  std::vector<float> acc;    // [rows, width]
  std::vector<float> wide;   // [kTile, width]
  std::vector<float> score;  // [keys, padded]
  std::vector<double> sum;   // [padded]
};

}  // namespace

void block_attention(const BlockAttentionParams& p, Stream) {
  parallel_for(int64_t{p.B} * p.G, 1, [&](int64_t begin, int64_t end) {
    dispatch(p.dtype, [&](auto element) {
      for (int64_t i = begin; i < end; ++i)
        Head<decltype(element)>(p, static_cast<int>(i / p.G), static_cast<int>(i % p.G)).run();
    });
  });
}

}  // namespace kdtree::cpu
