#include <algorithm>
#include <vector>

#include "int4.h"

namespace kdtree::cpu {

// The 16 codes of one nibble of 16 words, less 8.
[[gnu::always_inline]] static inline void decode(const int32_t* words, int nibble, float* q) {
  for (int l = 0; l < kInt4Lanes; ++l) q[l] = float((words[l] >> 4 * nibble & 15) - 8);
}

// Adds one tile to sum[r][g][h][lane], where h picks the outputs of row + 8.
using Int4Sums = float[8][2][kInt4Lanes];

template <class Element>
[[gnu::always_inline]] inline void add_tile(const int32_t* w, const Element* scale,
                                            const float* const* x, int rows, int64_t tile,
                                            Int4Sums* sum) {
  for (int g = 0; g < 8; ++g) {
    int32_t words[kInt4Lanes];
    std::copy_n(w + kInt4Lanes * g, kInt4Lanes, words);
    for (int h = 0; h < 2; ++h) {
      float q[kInt4Orders][kInt4Lanes], s[kInt4Lanes];
      for (int order = 0; order < kInt4Orders; ++order)
        decode(words, 4 * (order % 2) + 2 * (order / 2) + h, q[order]);
      const float s0 = scale[g + 8 * h], s1 = scale[g + 8 * h + 16];
      for (int l = 0; l < kInt4Lanes; ++l) s[l] = l & 2 ? s1 : s0;
      for (int r = 0; r < rows; ++r) {
        const float* v = x[r] + tile * kInt4TileFloats;
        float* out = sum[r][g][h];
        for (int l = 0; l < kInt4Lanes; ++l) {
          float a = q[0][l] * v[l];
          a = __builtin_fmaf(q[1][l], v[kInt4Lanes + l], a);
          a = __builtin_fmaf(q[2][l], v[2 * kInt4Lanes + l], a);
          a = __builtin_fmaf(q[3][l], v[3 * kInt4Lanes + l], a);
          out[l] = __builtin_fmaf(a, s[l], out[l]);
        }
      }
    }
  }
}

template <class Element>
[[gnu::always_inline]] inline void product(const int32_t* w, const Element* scale,
                                           const float* const* x, int rows, int I, Int4Out* y) {
  Int4Sums sum[kInt4Rows];
  std::fill_n(&sum[0][0][0][0], rows * sizeof(Int4Sums) / sizeof(float), 0.0f);
  for (int64_t tile = 0; tile < I / kInt4Tile; ++tile)
    add_tile(w + tile * kInt4Words, scale + tile * kInt4Tile, x, rows, tile, sum);
  for (int r = 0; r < rows; ++r) {
    for (int o = 0; o < kInt4Tile; ++o) {
      const float* lane = sum[r][o % 8][o / 8 % 2] + 2 * (o / 16);  // lanes [t][k] of this output
      const auto pair = [&](int t) { return lane[4 * t] + lane[4 * t + 1]; };
      y[r][o] = (pair(0) + pair(1)) + (pair(2) + pair(3));
    }
  }
}

[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void int4_product(const int32_t* w, const float* scale, const float* const* x, int rows, int I,
                  Int4Out* y) {
  product(w, scale, x, rows, I, y);
}

[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void int4_product(const int32_t* w, const bf16* scale, const float* const* x, int rows, int I,
                  Int4Out* y) {
  product(w, scale, x, rows, I, y);
}

template <class Element>
static void int4_linear(const Int4LinearParams& p) {
  constexpr int kBlock = 64;  // rows that are arranged at a time
  const auto* x = static_cast<const Element*>(p.x);
  const auto* scale = static_cast<const Element*>(p.scale);
  auto* y = static_cast<Element*>(p.y);
  const int64_t size = int4_arranged(p.I);
  std::vector<float> arranged(std::min(p.T, kBlock) * size);
  for (int first = 0; first < p.T; first += kBlock) {
    const int count = std::min(kBlock, p.T - first);
    parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        int4_arrange(x + (first + r) * p.x_stride, p.I, &arranged[r * size]);
    });
    parallel_for(p.O / kInt4Tile, 1, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        for (int r = 0; r < count; r += kInt4Rows) {
          const int rows = std::min(kInt4Rows, count - r);
          const float* row[kInt4Rows];
          Int4Out out[kInt4Rows];
          for (int i = 0; i < rows; ++i) row[i] = &arranged[(r + i) * size];
          int4_product(p.w + tile * p.I / kInt4Tile * kInt4Words, scale + tile * p.I, row, rows,
                       p.I, out);
          for (int i = 0; i < rows; ++i)
            for (int o = 0; o < kInt4Tile; ++o)
              y[int64_t{first + r + i} * p.O + tile * kInt4Tile + o] = Element(out[i][o]);
        }
      }
    });
  }
}

void int4_linear(const Int4LinearParams& p, Stream) {
  dispatch(p.dtype, [&](auto element) { int4_linear<decltype(element)>(p); });
}

}  // namespace kdtree::cpu
