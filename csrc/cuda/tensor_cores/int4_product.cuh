// A warp's part of a product with INT4 tiles in shared memory.
#pragma once

#include "../early.cuh"
#include "product.cuh"

namespace kdtree::cuda {

void int4_linear_mma(const Product&, Stream);   // bf16 rows and scales; any GPU, any alignment
bool int4_linear_sm90(const Product&, Stream);  // sm_90a and vectors; false: done nothing
bool int4_linear_few(Product, Stream);          // likewise, up to 16 rows and few outputs

// Of each of two tiles' scales, kTileScales bytes apart, two matrices, whose rows are in turn the scales
// of 8 outputs and of the next 8: transposed, a lane has both of its outputs'. Where its row stands.
template <int kTileScales>
__device__ inline int scales_of_lane() {
  const int lane = threadIdx.x % kWarp;
  return lane / 16 * kTileScales + lane / 8 % 2 * 32 + lane % 2 * 16;
}

// sum += a tile (a lane's 16 bytes of it) times rows, over kInt4Unit. scale: of the outputs g and
// g + 8 in one word, of g + 16 and g + 24 in the other; x: address of a lane's matrix row; kLine:
// bytes of a row of x
template <int kLine, int kNT>
__device__ inline void multiply_tile(const uint4& tile, uint32_t x, const uint32_t (&scale)[2],
                                     Sums<2, kNT>& sum) {
  const uint32_t words[2][2] = {{tile.x, tile.y}, {tile.z, tile.w}};
  uint32_t b[kNT][2][2];
#pragma unroll
  for (int n = 0; n < kNT; ++n) {
    uint32_t all[4];
    load_matrices(x + n * 8 * kLine, all);
    b[n][0][0] = all[0], b[n][0][1] = all[1], b[n][1][0] = all[2], b[n][1][1] = all[3];
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    uint32_t a[2][4];
    int4_parts(words[m][0], a[0]);
    int4_parts(words[m][1], a[1]);
    const float low = __uint_as_float(scale[m] << 16), high = __uint_as_float(scale[m] & ~0xffffu);
#pragma unroll
    for (int n = 0; n < kNT; ++n) {
      float group[4];
      mma_first(group, a[0], b[n][0]);
      mma(group, a[1], b[n][1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m][n][i] = fmaf(i < 2 ? low : high, group[i], sum[m][n][i]);
    }
  }
}

// The sums of whole codes from those of int4_parts.
template <int kNT>
__device__ inline void in_whole_codes(Sums<2, kNT>& sum) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < kNT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m][n][i] *= kInt4Unit;
}

// Where a lane reads in the first stage.
template <int kLine>
struct Int4Lane {
  const char* words;
  uint32_t scales, x;

  // tiles, scale, rows: the warp's
  __device__ Int4Lane(const char* tiles, const char* scale, const char* rows) {
    const int lane = threadIdx.x % kWarp;
    words = tiles + lane * 16;
    scales = shared_address(scale) + scales_of_lane<2 * kInt4Tile>();
    x = shared_address(rows) + lane % 8 * kLine + lane / 8 * 16;
  }

  // sum += the first `left` of kTiles tiles of the stage at `at`, in order
  template <int kTiles, int kNT>
  __device__ void multiply(int at, int left, Sums<2, kNT>& sum) const {
    static_assert(kTiles % 2 == 0, "scales are loaded for two tiles");
    constexpr int kTileBytes = kInt4Words * 4, kRow = kInt4Tile * 2;  // bytes
    const auto two = [&](int j, bool both) {
      uint32_t scale[4];
      load_transposed(scales + at + j * kRow, scale);
      const auto* tile = reinterpret_cast<const uint4*>(words + at + j * kTileBytes);
      multiply_tile<kLine>(tile[0], x + at + j * kRow, {scale[0], scale[1]}, sum);
      if (both)
        multiply_tile<kLine>(tile[kWarp], x + at + (j + 1) * kRow, {scale[2], scale[3]}, sum);
    };
    constexpr int kAtOnce = kNT > 1 ? 1 : kTiles / 2;  // many rows leave no registers for more
    if (left >= kTiles) {
#pragma unroll kAtOnce
      for (int j = 0; j < kTiles; j += 2) two(j, true);
    } else {
      for (int j = 0; j < left; j += 2) two(j, j + 1 < left);
    }
  }
};

}  // namespace kdtree::cuda
