// What the kernels of latent_sm90.cu and latent_spread.cu share; scores of 64 rows x 64 positions, and
// their weights, by a warpgroup of sm_90a.
#pragma once

#include "latent.cuh"
#include "latent_wgmma.cuh"

namespace kdtree::cuda {

struct LatentTensors {
  CUtensorMap q, cache;
  LatentJob job;
};
// The splits of few rows, on so many processors; 0 where rows are many.
int latent_spread(const LatentTensors& t, Stream stream);

namespace latent_sm90_parts {

inline constexpr int kRows = 64, kGroup = 128, kGroupWarps = kGroup / kWarp;
inline constexpr int kBoxWidth = 64, kBox = 64 * 128;  // features of a box; bytes of 64 rows of it
inline constexpr int kBoxes = kWidth / kBoxWidth, kTileBytes = kBoxes * kBox;
inline constexpr int kShares = 3, kShareBoxes = kBoxes / kShares;  // of a tile, which come one by one
static_assert(kBoxes * kBoxWidth == kWidth && kTileKeys == kBoxWidth);

// The tiles of a block or cluster, split by split.
struct Walk {
  int splits, most, round, part, at, end;
  // So many positions further, or to the next split; part < 0 behind the last one.
  __device__ bool next(int keys) {
    at += keys;
    if (at < end) return true;
    part = part_of_round(++round, splits);
    if (part < 0) return false;
    at = split_begin(part), end = min(split_begin(part + 1), most);
    return true;
  }
};

// Read anew where they are used, so that they take no registers in between.
__device__ inline int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
// The first of a thread's two rows: g and g + 8 of its warp's 16.
__device__ inline int row_now() {
  const int thread = thread_now();
  return thread % kGroup / kWarp * 16 + thread % kWarp / 4;
}

// The rows of a block or cluster: its sequence, the first of them there, how many.
struct Rows {
  int b, first, count;
  __device__ Rows(const LatentJob& job, int index) {
    const int tiles = ceil_div(job.rows(), kRows);
    b = index / tiles, first = index % tiles * kRows, count = min(kRows, job.rows() - first);
  }
  __device__ int first_query(const LatentJob& job) const {
    return ((job.b + b) * job.p.N + job.n) * job.p.H + first;
  }
};

// The pages of a sequence.
__device__ inline const int32_t* table_of(const LatentJob& job, int sequence) {
  return job.p.block_table + int64_t{job.b + sequence} * job.p.max_pages;
}

template <int kBarrier>
__device__ inline void group_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kGroup) : "memory");
}

// Zeros in `boxes` boxes of 64 positions from position `count` on, by a warpgroup.
__device__ inline void clear_rest(char* keys, int boxes, int count) {
#pragma unroll 1  // it spares registers
  for (int i = thread_now() % kGroup; i < (kTileKeys - count) * boxes * 8; i += kGroup) {
    const int key = count + i / (boxes * 8), chunk = i % (boxes * 8);
    *reinterpret_cast<int4*>(keys + chunk / 8 * kBox + key * 128 + chunk % 8 * 16) = {0, 0, 0, 0};
  }
}

// A thread's share of scores: its two rows, the positions 8 n + 2t and 8 n + 2t + 1. The queries stand
// in registers.
struct Scores {
  static constexpr int kSteps = kWidth / 16;
  uint32_t q[kSteps][4];
  float score[8][4];

  // Fragment i of queries that stand in boxes from `at` on.
  __device__ static void load_query(uint32_t at, int i, uint32_t (&m)[4]) {
    const int lane = threadIdx.x % kWarp, row = threadIdx.x % kGroup / kWarp * 16 + lane % 16;
    load_matrices(at + i / 4 * kBox + row * 128 + ((i % 4 * 2 + lane / 16) ^ row % 8) * 16, m);
  }

  // Of the keys in boxes from `keys` on, share by share. wait(share): until it is there
  template <class Wait>
  __device__ void multiply(uint32_t keys, Wait wait) {
    constexpr int kShareSteps = kSteps / kShares;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i % kShareSteps == 0) {
        wait(i / kShareSteps);
        wgmma_begin();
      }
      wgmma_scores(score, q[i], wgmma_operand(keys + i / 4 * kBox + i % 4 * 32));
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(score);
  }

  // seen: of the tile's positions, by row
  __device__ void scale_and_cut(float scale, const int (&seen)[2]) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] *= scale;
    if (!__any_sync(~0u, min(seen[0], seen[1]) < kTileKeys)) return;
    const int first = thread_now() % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (8 * n + first + i % 2 >= seen[i / 2]) score[n][i] = -INFINITY;
  }

  // Of a row's scores and `top`.
  __device__ float largest(int r, float top) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  }

  // A row's weights to a box at `to`; their sum.
  __device__ float weigh(int r, float base, uint32_t to) {
    const int row = row_now() + 8 * r;
    to += row * 128 + row % 8 * 16 + thread_now() % 4 * 4;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float &low = score[n][2 * r], &high = score[n][2 * r + 1];
      low = exp2_of(low - base), high = exp2_of(high - base);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to ^ n << 4), "r"(pack(low, high)) : "memory");
      low += high;
    }
    const auto added = [&](int n) { return score[n][2 * r]; };
    float all = ((added(0) + added(1)) + (added(2) + added(3))) +
                ((added(4) + added(5)) + (added(6) + added(7)));
    all += __shfl_xor_sync(~0u, all, 1);
    return all + __shfl_xor_sync(~0u, all, 2);
  }
};

}  // namespace latent_sm90_parts
}  // namespace kdtree::cuda
