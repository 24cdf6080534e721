// Rows (a node's head each) of one sequence share every tile of latents, widened once; a row's own
// sums do not depend on which rows those are. Scores are in units of log2 e, so that exp is exp2.
#include <algorithm>
#include <limits>
#include <vector>

#include "fp8.h"
#include "mla.h"

namespace kdtree::cpu {
namespace {

constexpr int kTile = 32;    // keys of a tile: 18 KB of float32 at C + R = 144, which L1 holds
constexpr int kRows = 32;    // rows that share a tile
constexpr int kMinRows = 4;  // rows worth a thread
constexpr int kKeys = 8;     // keys whose scores are summed at once
constexpr float kEmpty = -std::numeric_limits<float>::infinity();
static_assert(kPage % kTile == 0 && kSplit % kTile == 0 && kTile >= kTail && kTile == 2 * kLanes);

// The softmax of some keys so far: their largest score, the sum of 2^(score - top), and the sum of
// latents weighted so.
struct Softmax {
  float top, sum;
  float* acc;  // [values], a whole number of lanes
};

struct Row {
  int position;  // negative marks padding
  int body;      // keys of part one: positions 0 .. body - 1
  const float* q;
  Softmax part, total;
};

struct Shape {
  int width;   // of a widened latent: C + R in whole lanes
  int values;  // C in whole lanes
  float scale;
};

// The largest of a tile's scores. A NaN may be lost here, not in the sum.
[[gnu::always_inline]] inline float largest(const float* score) {
  Lanes top;
#pragma GCC unroll 1
  for (int l = 0; l < kLanes; ++l) top[l] = larger(score[l], score[l + kLanes]);
#pragma GCC unroll 1
  for (int l = 0; l < 8; ++l) top[l] = larger(top[l], top[l + 8]);
#pragma GCC unroll 1
  for (int l = 0; l < 4; ++l) top[l] = larger(top[l], top[l + 4]);
  return larger(larger(top[0], top[2]), larger(top[1], top[3]));
}

// acc = acc * keep + sum over the keys in order of weight * latent, in K times kLanes features.
template <int K>
[[gnu::always_inline]] inline void add_values(const float* weight, const float* keys, int count,
                                              int width, float keep, float* acc) {
  Lanes sum[K];
#pragma GCC unroll 8
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 1
    for (int l = 0; l < kLanes; ++l) sum[k][l] = acc[k * kLanes + l] * keep;
#pragma GCC unroll 1
  for (int j = 0; j < count; ++j)
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k)
#pragma GCC unroll 1
      for (int l = 0; l < kLanes; ++l)
        sum[k][l] = std::fma(weight[j], keys[int64_t{j} * width + k * kLanes + l], sum[k][l]);
#pragma GCC unroll 8
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 1
    for (int l = 0; l < kLanes; ++l) acc[k * kLanes + l] = sum[k][l];
}

// Adds the first `count` keys of a tile [kTile, width] to a softmax. The other keys are left out
// after their scores, so they may be anything.
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void add_tile(Softmax& s, const float* q, const float* keys, int count, const Shape& shape) {
  float weight[kTile];
  for (int j = 0; j < count; j += kKeys)
    dots<kKeys>(q, keys + int64_t{j} * shape.width, shape.width, weight + j);
#pragma GCC unroll 1
  for (int j = 0; j < kTile; ++j) weight[j] = j < count ? weight[j] * shape.scale : kEmpty;

  const float top = larger(s.top, largest(weight));
  const float keep = exp2_negative(s.top - top);
#pragma GCC unroll 1
  for (int j = 0; j < kTile; ++j) weight[j] = exp2_negative(weight[j] - top);
  Lanes sum;
#pragma GCC unroll 1
  for (int l = 0; l < kLanes; ++l) sum[l] = weight[l] + weight[l + kLanes];
  s.sum = std::fma(s.sum, keep, tree_sum(sum));
  s.top = top;

  int c = 0;
  for (; c + 8 * kLanes <= shape.values; c += 8 * kLanes)
    add_values<8>(weight, keys + c, count, shape.width, keep, s.acc + c);
  for (; c < shape.values; c += kLanes)
    add_values<1>(weight, keys + c, count, shape.width, keep, s.acc + c);
}

void clear(Softmax& s, int values) {
  s.top = kEmpty;
  s.sum = 0;
  std::fill_n(s.acc, values, 0.f);
}

// Adds a finished part, which is not empty, to the total.
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void fold(Softmax& total, const Softmax& part, int values) {
  const float top = larger(total.top, part.top);
  const float keep = exp2_negative(total.top - top), add = exp2_negative(part.top - top);
  total.top = top;
  total.sum = std::fma(total.sum, keep, part.sum * add);
#pragma GCC unroll 1
  for (int c = 0; c < values; c += kLanes)
#pragma GCC unroll 1
    for (int l = 0; l < kLanes; ++l)
      total.acc[c + l] = std::fma(total.acc[c + l], keep, part.acc[c + l] * add);
}

template <class Element>
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void widen_row(const Element* x, int n, float* wide) {
  widen(x, n, wide);
}

// A row of FP8 latents; C is a whole number of lanes.
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void widen_fp8(const uint8_t* row, int C, int R, float* wide) {
  const float scale = load_scale(row, C);
  for (int c = 0; c < C; ++c) wide[c] = kE4m3[row[c]] * scale;
  widen(rope_of(row, C), R, wide + C);
}
static_assert(kFp8Align % kLanes == 0);

// The token slot that holds a position of a row: its own ancestor's from the context on.
int slot_of(int position, int context, bool chain, uint64_t ancestors) {
  if (chain || position < context) return position;
  for (int i = position - context; i > 0; --i) ancestors &= ancestors - 1;
  return context + std::countr_zero(ancestors);
}

// The rows of one thread: at most kRows of one sequence at a time.
template <class Element>
class Block {
 public:
  explicit Block(const MlaAttentionParams& p)
      : p(p),
        shape{whole_lanes(p.C + p.R), whole_lanes(p.C),
              static_cast<float>(p.scale * 1.4426950408889634)},
        q(int64_t{kRows} * shape.width),
        acc(int64_t{kRows} * 2 * shape.values),
        keys(int64_t{kTile} * shape.width) {}

  // Row r is head r % H of node r / H of sequence b; r0 <= r < r0 + count.
  void run(int b, int64_t r0, int count) {
    int body = 0;
    for (int i = 0; i < count; ++i) {
      begin_row(b, r0 + i, i);
      body = std::max(body, row[i].body);
    }
    for (int begin = 0; begin < body; begin += kSplit)
      add_split(b, begin, std::min(begin + kSplit, body), count);
    for (int i = 0; i < count;) {  // the rows of a node share their tail
      const int64_t n = (r0 + i) / p.H;
      const int end = static_cast<int>(std::min<int64_t>(count, (n + 1) * p.H - r0));
      if (row[i].position >= 0) add_tail(b, n, i, end);
      for (; i < end; ++i) write_row(b, r0 + i, i);
    }
  }

 private:
  uint64_t ancestors_of(int b, int64_t n) const {
    return p.ancestors ? static_cast<uint64_t>(p.ancestors[int64_t{b} * p.N + n]) : 0;
  }

  void begin_row(int b, int64_t r, int i) {
    const int64_t n = r / p.H;
    const int ahead = p.ancestors ? std::popcount(ancestors_of(b, n)) : static_cast<int>(n) + 1;
    row[i].position = ahead > 0 ? p.context[b] + ahead - 1 : -1;
    row[i].body = std::max(row[i].position - kTail + 1, 0);
    float* wide = q.data() + int64_t{i} * shape.width;
    const int Z = p.C + p.R;
    const int64_t at = int64_t{b} * p.N * p.H + r;
    if (ahead > 0) widen_row(static_cast<const Element*>(p.q) + at * Z, Z, wide);
    row[i].q = wide;
    row[i].part.acc = acc.data() + int64_t{i} * 2 * shape.values;
    row[i].total.acc = row[i].part.acc + shape.values;
    clear(row[i].total, shape.values);
  }

  void load_key(int b, int slot, int at) {
    const int page = p.block_table[int64_t{b} * p.max_pages + slot / kPage];
    const int64_t token = int64_t{page} * kPage + slot % kPage;
    float* wide = keys.data() + int64_t{at} * shape.width;
    if (p.fp8_bytes) {
      const auto* row = static_cast<const uint8_t*>(p.cache) + token * p.fp8_bytes;
      return widen_fp8(row, p.C, p.R, wide);
    }
    const int Z = p.C + p.R;
    widen_row(static_cast<const Element*>(p.cache) + token * Z, Z, wide);
  }

  // Part one, in [begin, end): every position is its slot.
  void add_split(int b, int begin, int end, int count) {
    for (int i = 0; i < count; ++i) clear(row[i].part, shape.values);
    for (int tile = begin; tile < end; tile += kTile) {
      for (int j = tile; j < std::min(tile + kTile, end); ++j) load_key(b, j, j - tile);
      for (int i = 0; i < count; ++i) {
        const int visible = std::min(kTile, row[i].body - tile);
        if (visible > 0) add_tile(row[i].part, row[i].q, keys.data(), visible, shape);
      }
    }
    for (int i = 0; i < count; ++i)
      if (row[i].body > begin) fold(row[i].total, row[i].part, shape.values);
  }

  // Part two of node n's rows [first, end).
  void add_tail(int b, int64_t n, int first, int end) {
    const int body = row[first].body, visible = row[first].position + 1 - body;
    for (int j = 0; j < visible; ++j)
      load_key(b, slot_of(body + j, p.context[b], !p.ancestors, ancestors_of(b, n)), j);
    for (int i = first; i < end; ++i) {
      clear(row[i].part, shape.values);
      add_tile(row[i].part, row[i].q, keys.data(), visible, shape);
      fold(row[i].total, row[i].part, shape.values);
    }
  }

  void write_row(int b, int64_t r, int i) {
    auto* out = static_cast<Element*>(p.out) + (int64_t{b} * p.N * p.H + r) * p.C;
    const Softmax& s = row[i].total;
    for (int c = 0; c < p.C; ++c) out[c] = Element(row[i].position < 0 ? 0 : s.acc[c] / s.sum);
  }

  const MlaAttentionParams& p;
  const Shape shape;
  std::vector<float> q;     // [kRows, width]
  std::vector<float> acc;   // [kRows, 2, values]
  std::vector<float> keys;  // [kTile, width]
  Row row[kRows];
};

}  // namespace

void mla_attention(const MlaAttentionParams& p, Stream) {
  const int64_t rows = int64_t{p.N} * p.H;  // of a sequence
  parallel_for(p.B * rows, kMinRows, [&](int64_t begin, int64_t end) {
    dispatch(p.dtype, [&](auto element) {
      Block<decltype(element)> block(p);
      while (begin < end) {
        const int64_t b = begin / rows, r0 = begin % rows;
        const int count = static_cast<int>(std::min<int64_t>({end - begin, kRows, rows - r0}));
        block.run(static_cast<int>(b), r0, count);
        begin += count;
      }
    });
  });
}

}  // namespace kdtree::cpu
