// A stage of a product by mma.sync in shared memory: 64 inputs of weights and of rows, how they come
// there by asynchronous copies of all threads, and their product.
#pragma once

#include "product.cuh"

namespace kdtree::cuda {

inline constexpr int kStep = 64;         // inputs
inline constexpr int kLine = 2 * kStep;  // bytes of a row of a stage
inline constexpr int kChunk = 8;         // bf16 of 16 bytes
inline constexpr int kChunks = kStep / kChunk;

// Where chunk c of row r of a stage lies, in bytes: chunks c of eight rows are in different banks.
__device__ inline int chunk_at(int r, int c) { return r * kLine + ((c ^ (r & 7)) << 4); }

// 16 bytes to shared memory: the first `left` elements at p, then zeros.
template <bool kVectors>
__device__ inline void copy_chunk(char* to, const Bf16* p, int left) {
  if constexpr (kVectors) {
    copy_async(to, p, left > 0);
  } else {
    Vec<Bf16> v;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) v.v[e] = e < left ? p[e] : Bf16(0.0f);
    *reinterpret_cast<Vec<Bf16>*>(to) = v;
  }
}

// kRows rows of a stage to shared memory, from input i of I on; zeros for rows from `rows` on.
template <bool kVectors, int kRows, int kThreads>
__device__ inline void load_rows(char* to, const Bf16* from, int64_t stride, int rows, int i,
                                 int I) {
  constexpr int kPass = kThreads / kChunks;
  const int c = threadIdx.x % kChunks, first = threadIdx.x / kChunks, left = I - i - c * kChunk;
  const Bf16* p = from + first * stride + i + c * kChunk;
#pragma unroll
  for (int n = 0; n < ceil_div(kRows, kPass); ++n, p += kPass * stride) {
    const int r = n * kPass + first;
    if (kRows % kPass != 0 && r >= kRows) break;
    const bool any = r < rows && left > 0;
    copy_chunk<kVectors>(to + chunk_at(r, c), any ? p : from, any ? left : 0);
  }
}

// The B fragments of 8 * kNT rows for 16 inputs of a stage, from chunk c on.
template <int kNT>
__device__ inline void load_b(uint32_t rows, int c, uint32_t (&b)[kNT][2]) {
  const int lane = threadIdx.x % kWarp, r = lane % 8, chunk = c + lane / 8 % 2;
  if constexpr (kNT == 1) {
    load_matrices(rows + chunk_at(r, chunk), b[0]);
  } else {
#pragma unroll
    for (int n = 0; n < kNT; n += 2) {
      uint32_t two[4];
      load_matrices(rows + chunk_at(r + lane / 16 * 8 + 8 * n, chunk), two);
      b[n][0] = two[0], b[n][1] = two[1], b[n + 1][0] = two[2], b[n + 1][1] = two[3];
    }
  }
}

// sum += a step's weights times its rows
template <int kMT, int kNT>
__device__ inline void multiply(uint32_t weights, uint32_t rows, Sums<kMT, kNT>& sum) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int c = 0; c < kChunks; c += 2) {
    uint32_t a[kMT][4], b[kNT][2];
#pragma unroll
    for (int m = 0; m < kMT; ++m)
      load_matrices(weights + m * 16 * kLine + chunk_at(lane % 16, c + lane / 16), a[m]);
    load_b(rows, c, b);
#pragma unroll
    for (int m = 0; m < kMT; ++m)
#pragma unroll
      for (int n = 0; n < kNT; ++n) mma(sum[m][n], a[m], b[n]);
  }
}

}  // namespace kdtree::cuda
