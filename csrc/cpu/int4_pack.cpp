#include "common.h"

namespace kdtree::cpu {

// Word `word` of lane `lane` of the tile whose first code word is `codes`: a tile's row is four
// code words, and the two codes that a lane takes of one are its byte t.
static uint32_t pack_word(const int32_t* codes, int64_t row, int lane, int word) {
  const int g = lane / 4, t = lane % 4, m = word / 2, k = word % 2;
  uint32_t packed = 0;
  for (int pair = 0; pair < 4; ++pair) {
    const int output = 16 * m + g + 8 * (pair & 1);
    const auto source = static_cast<uint32_t>(codes[output * row + 2 * k + (pair >> 1)]);
    const uint32_t even = source >> 8 * t & 15, odd = source >> (8 * t + 4) & 15;
    packed |= even << 4 * pair | odd << (4 * pair + 16);
  }
  return packed;
}

template <class Element>
static void pack_tile_row(const Int4PackParams& p, int64_t row) {  // row: of [E, O / 32]
  const int tiles = p.I / kInt4Tile;
  const int64_t words = p.I / 8;
  const auto* codes = p.codes + row * kInt4Tile * words;
  const auto* scale = static_cast<const Element*>(p.scale) + row * kInt4Tile * tiles;
  auto* packed = p.packed + row * tiles * kInt4Words;
  auto* packed_scale = static_cast<Element*>(p.packed_scale) + row * tiles * kInt4Tile;
  for (int tile = 0; tile < tiles; ++tile) {
    for (int i = 0; i < kInt4Words; ++i)
      *packed++ = static_cast<int32_t>(pack_word(codes + 4 * tile, words, i / 4, i % 4));
    for (int o = 0; o < kInt4Tile; ++o) *packed_scale++ = scale[int64_t{o} * tiles + tile];
  }
}

void int4_pack(const Int4PackParams& p, Stream) {
  dispatch(p.dtype, [&](auto element) {
    parallel_for(int64_t{p.E} * (p.O / kInt4Tile), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) pack_tile_row<decltype(element)>(p, row);
    });
  });
}

}  // namespace kdtree::cpu
