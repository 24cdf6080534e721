// What a launch of queries does besides its products: the rope parts, and the appending of the rows
// to the latent cache.
#pragma once

#include "../mla.cuh"
#include "product.cuh"

namespace kdtree::cuda {

// Of queries: what follows a head's outputs is its last R features, rotated.
struct Rotation {
  const float* rope = nullptr;        // [positions, R]
  const int32_t* position = nullptr;  // [T]; null: no rows are padded
  int R = 0, positions = 0;
  bool interleaved = false;
};

// The rows share, share + shares and so on of one head: x and y are the first row's rope parts. A warp
// takes a row; kBatch rows are loaded before they are stored.
template <int kWarps, int kBatch>
__device__ inline void rotate_rows(const Rotation& r, const Bf16* x, int64_t x_row, Bf16* y,
                                   int64_t y_row, int t0, int rows, int share, int shares) {
  const int next = kWarps * shares;  // row of the same warp
#pragma unroll 1
  for (int t = share + threadIdx.x / kWarp * shares; t < rows; t += kBatch * next)
#pragma unroll 1
    for (int i = threadIdx.x % kWarp; i < r.R / 2; i += kWarp) {
      int position[kBatch];
      Pair pair[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) position[k] = r.position[t0 + min(t + k * next, rows - 1)];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int at = min(max(position[k], 0), r.positions - 1);
        pair[k].load(x + min(t + k * next, rows - 1) * x_row, r.rope + int64_t{at} * r.R, r.R,
                     r.interleaved, i);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (t + k * next >= rows) break;
        if (position[k] < 0) pair[k].a = pair[k].b = pair[k].cosine = pair[k].sine = 0;
        pair[k].store(y + (t + k * next) * y_row);
      }
    }
}

inline constexpr int kAppendHeld = 16;  // features of a latent that a lane holds
inline constexpr int kAppendFeatures = kAppendHeld * kWarp;

// Row t of mla_append by a warp, at most kAppendFeatures, with the bits of the block of mla_append.cu:
// lane l takes what there the threads l, l + 32, l + 64 and l + 96 take. All loads come first.
__device__ inline void append_row(const MlaAppendParams& p, int t) {
  constexpr int kParts = 4;
  const int lane = threadIdx.x % kWarp, slot = p.slot[t];
  const int position = min(max(p.position[t], 0), p.positions - 1);
  const Bf16* row = static_cast<const Bf16*>(p.kv) + t * p.kv_stride;
  const float* table = p.rope + int64_t{position} * p.R;
  Bf16 x[kAppendHeld], w[kAppendHeld];
#pragma unroll
  for (int i = 0; i < kAppendHeld; ++i) {
    const int c = lane + i * kWarp;
    x[i] = c < p.C ? row[c] : Bf16(0.0f);
    w[i] = c < p.C ? static_cast<const Bf16*>(p.w)[c] : Bf16(0.0f);
  }
  Pair pair;
  if (lane < p.R / 2) pair.load(row + p.C, table, p.R, p.interleaved, lane);

  float sum[kParts] = {}, all = 0;
#pragma unroll
  for (int i = 0; i < kAppendHeld; ++i)
    sum[i % kParts] = fmaf(float(x[i]), float(x[i]), sum[i % kParts]);
#pragma unroll
  for (int i = 0; i < kParts; ++i) all += warp_sum(sum[i]);
  if (slot < 0 || slot >= p.slots) return;
  Bf16* y = static_cast<Bf16*>(p.cache) + int64_t{slot} * (p.C + p.R);
  const float scale = rsqrtf(all / p.C + p.eps);
#pragma unroll
  for (int i = 0; i < kAppendHeld; ++i)
    if (const int c = lane + i * kWarp; c < p.C) y[c] = Bf16(float(x[i]) * scale * float(w[i]));
  if (lane < p.R / 2) pair.store(y + p.C);
  for (int i = lane + kWarp; i < p.R / 2; i += kWarp)
    rotate_pair(row + p.C, table, p.R, p.interleaved, i, y + p.C);
}

}  // namespace kdtree::cuda
