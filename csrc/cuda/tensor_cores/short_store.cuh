// What a product of few inputs is, and how its sums become outputs.
#pragma once

#include "mma_stage.cuh"
#include "query_parts.cuh"

namespace kdtree::cuda {

struct ShortProduct {
  Product p;
  int64_t y_row, y_group;  // elements
  Rotation rotation;       // of x's features from I on, to y's from O on
  MlaAppendParams append;  // rows of the same launch; T = 0: none
  int append_blocks;       // along y, the first
  int row_tiles;           // of a block
  bool wide;               // outputs are stored by 16 bytes
};

// An 8 x 8 matrix of bf16, lane 4 * g + t holding elements 2t and 2t + 1 of row g, transposed.
__device__ inline uint32_t transposed(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  uint32_t m;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
      : "=r"(m)
      : "r"(reinterpret_cast<const uint32_t&>(pair)));
  return m;
}

// Lane t of four holds word t of four vectors, and is left with vector t.
__device__ inline uint4 turn_quad(const uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
  const uint32_t b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  // Words 0 and 1, or 2 and 3, of the vectors t % 2 and t % 2 + 2.
  const uint32_t low[2] = {odd ? a : w[0], odd ? w[1] : a};
  const uint32_t high[2] = {odd ? b : w[2], odd ? w[3] : b};
  const uint32_t c = __shfl_xor_sync(~0u, upper ? low[0] : high[0], 2);
  const uint32_t d = __shfl_xor_sync(~0u, upper ? low[1] : high[1], 2);
  return upper ? uint4{c, d, high[0], high[1]} : uint4{low[0], low[1], c, d};
}

// Which of a lane's rows are padded, a bit for each 8 rows from t on.
template <int kNT>
__device__ inline uint32_t padded_rows(const ShortProduct& job, int t) {
  uint32_t padded = 0;
  if (!job.rotation.position) return 0;
#pragma unroll
  for (int n = 0; n < kNT; ++n) {
    const int row = min(t + 8 * n + static_cast<int>(threadIdx.x) % kWarp / 4, job.p.T - 1);
    padded |= (job.rotation.position[row] < 0) << n;
  }
  return padded;
}

// A warp's sums as bf16 outputs from o on of rows from t on, by 16 bytes, or by 4 where it has but
// one tile. O is a multiple of 8.
template <int kMT, int kNT>
__device__ inline void store_wide(const ShortProduct& job, int g, const Sums<kMT, kNT>& sum, int o,
                                  int t, uint32_t padded) {
  constexpr int kOfRow = 2 * kMT, kAll = kOfRow * kNT;  // vectors of 8 outputs
  const int lane = threadIdx.x % kWarp, quad = lane % 4;
  Bf16* y = static_cast<Bf16*>(job.p.y) + g * job.y_group;
  const auto word = [&](int v) {
    const float* two = sum[v % kOfRow / 2][v / kOfRow] + v % 2 * 2;
    return transposed(two[0], two[1]);
  };
  if constexpr (kAll == 2) {
    const uint32_t w[2] = {word(0), word(1)};
    t += lane / 4;
#pragma unroll
    for (int v = 0; v < 2; ++v)
      if (const int at = o + 8 * v; t < job.p.T && at < job.p.O)
        reinterpret_cast<uint32_t*>(y + t * job.y_row + at)[quad] = padded ? 0 : w[v];
  } else {
#pragma unroll
    for (int v = 0; v < kAll; v += 4) {
      uint4 eight = turn_quad({word(v), word(v + 1), word(v + 2), word(v + 3)});
      const int n = (v + quad) / kOfRow, at = o + (v + quad) % kOfRow * 8;
      const int row = t + 8 * n + lane / 4;
      if (padded >> n & 1) eight = {};
      if (row < job.p.T && at < job.p.O)
        *reinterpret_cast<uint4*>(y + row * job.y_row + at) = eight;
    }
  }
}

// Likewise one by one, in y's dtype.
template <int kMT, int kNT, class Element>
__device__ inline void store_each(const ShortProduct& job, int g, const Sums<kMT, kNT>& sum, int o,
                                  int t, Element* y) {
  const int lane = threadIdx.x % kWarp;
  o += lane / 4, t += lane % 4 * 2;
  y += g * job.y_group + o;
#pragma unroll
  for (int n = 0; n < kNT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = t + 8 * n + j;
      if (row >= job.p.T) continue;
      const bool zero = job.rotation.position && job.rotation.position[row] < 0;
#pragma unroll
      for (int m = 0; m < kMT; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (const int at = 16 * m + 8 * i; o + at < job.p.O)
            y[row * job.y_row + at] = Element(zero ? 0.0f : sum[m][n][2 * i + j]);
    }
}

template <int kMT, int kNT>
__device__ inline void store_tile(const ShortProduct& job, int g, const Sums<kMT, kNT>& sum, int o,
                                  int t, uint32_t padded) {
  if (job.wide)
    store_wide(job, g, sum, o, t, padded);
  else if (job.p.y_dtype == DType::f32)
    store_each(job, g, sum, o, t, static_cast<float*>(job.p.y));
  else
    store_each(job, g, sum, o, t, static_cast<Bf16*>(job.p.y));
}

}  // namespace kdtree::cuda
