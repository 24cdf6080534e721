// The INT4 product that int4_linear and moe_experts share, over the tiles of Int4PackParams.
//
// The 16 words of one g of a tile are lanes [t][m][k]. A nibble of all 16 meets inputs that depend
// on t, k and the nibble, and outputs that depend on g, m and the nibble: with the inputs put in
// that order once per row, a tile is multiplied sixteen codes at a time without being unpacked.
#pragma once

#include "common.h"

namespace kdtree::cpu {

inline constexpr int kInt4Rows = 8;    // rows that share each decoded vector
inline constexpr int kInt4Lanes = 16;  // [t][m][k]
inline constexpr int kInt4Orders = 4;  // [column + 8][odd column]
inline constexpr int kInt4TileFloats = kInt4Orders * kInt4Lanes;  // of an arranged row

// The floats of one arranged row.
constexpr int64_t int4_arranged(int I) { return int64_t{I} / kInt4Tile * kInt4TileFloats; }

// out[i / 32][order][lane] = x[i], both values of m alike.
template <class Element>
void int4_arrange(const Element* x, int I, float* out) {
  for (int tile = 0; tile < I / kInt4Tile; ++tile) {
    for (int order = 0; order < kInt4Orders; ++order) {
      for (int lane = 0; lane < kInt4Lanes; ++lane) {
        const int t = lane / 4, k = lane % 2;
        *out++ = x[kInt4Tile * tile + 16 * k + 2 * t + 8 * (order / 2) + order % 2];
      }
    }
  }
}

// y[r][o] = one tile row (32 outputs, w: [I / 32, 128], scale: [I / 32, 32]) times the arranged row
// x[r], for r < rows <= kInt4Rows. The order of a row's sums depends on I alone.
using Int4Out = float[kInt4Tile];
void int4_product(const int32_t* w, const float* scale, const float* const* x, int rows, int I,
                  Int4Out* y);
void int4_product(const int32_t* w, const bf16* scale, const float* const* x, int rows, int I,
                  Int4Out* y);

}  // namespace kdtree::cpu
