// What the kernels of mla_attention on tensor cores share: latents of 512 + 64 features in bf16.
//
// The order of a row's sums, by absolute position alone:
//
//   score    one chain of mma over the 576 features, from zero
//   tile     64 positions, a page: the weights are 2^(score - top), top the largest score so far of
//            the split, rounded to bf16; the sums so far are multiplied by 2^(top before - top), the
//            weighted latents added by one chain of mma over the positions
//   split    so many tiles as split_begin says, from zero
//   tail     the last 16 positions, one step of mma in position order
//   row      the splits in order, the tail last
//
// The sum of a tile's weights: neighbours by pairs, then pairs 8, 16, 32, 2 and 4 positions apart.
// Rows are heads and nodes of a sequence, heads first, as q has them: each tile of latents in shared
// memory serves all rows of a block, as keys and as values. A row's positions from its tail on weigh
// exactly zero; no block has rows of nodes more than 15 apart, so a latent that it reads for one row
// is one that its other rows attend to as well, or zero.
#pragma once

#include "../early.cuh"
#include "../mma.cuh"
#include "barrier.cuh"
#include "device.cuh"

namespace kdtree::cuda {

using Bf16 = __nv_bfloat16;

inline constexpr int kWidth = kLatent + kRope;
inline constexpr int kTileKeys = kPage;
inline constexpr int kLatentPitch = kWidth + 8;     // elements of a row in shared memory: no two in a bank
inline constexpr int kChunks = kWidth / 8;    // of 16 bytes
inline constexpr float kLog2E = 1.442695041f;  // scores are in units of log2 e

// Sequences and nodes whose parts the workspace holds at once.
struct LatentJob {
  MlaAttentionParams p;
  int b, n, B, N;  // the first and how many
  int parts;       // of a row in the workspace
  bool aligned;    // q and cache stand on 16 bytes
  __host__ __device__ int rows() const { return N * p.H; }  // of a sequence
};

// The splits, by mma.sync.
void latent_mma(const LatentJob& job, Stream stream);
// By wgmma, of few rows by clusters: on so many processors; 0 where it cannot.
int latent_sm90(const LatentJob& job, Stream stream);
// Tail and merge of what a kernel left in the workspace, while it has `busy` processors.
void latent_merge(const LatentJob& job, int busy, Stream stream);

// Splits of three lengths, by where they begin.
__host__ __device__ inline int split_begin(int i) {
  constexpr int kFirst = kNear / kNearSplit, kSecond = kFirst + (kFar - kNear) / kMidSplit;
  if (i <= kFirst) return i * kNearSplit;
  if (i <= kSecond) return kNear + (i - kFirst) * kMidSplit;
  return kFar + (i - kSecond) * kFarSplit;
}

__host__ __device__ inline int splits_of(int keys) {
  const int near = min(keys, kNear), mid = min(keys, kFar) - kNear, far = keys - kFar;
  return ceil_div(near, kNearSplit) + ceil_div(max(mid, 0), kMidSplit) +
         ceil_div(max(far, 0), kFarSplit);
}

// A node of the job: where its rows stand, and how many positions come before their tail.
struct LatentNode {
  uint64_t ancestors;
  bool chain;
  int context, position;  // position < 0: padding

  __device__ LatentNode(const MlaAttentionParams& p, int b, int n) {
    context = p.context[b];
    chain = p.ancestors == nullptr;
    ancestors = chain ? 0 : static_cast<uint64_t>(p.ancestors[int64_t{b} * p.N + n]);
    const int ahead = chain ? n + 1 : __popcll(ancestors);
    position = ahead > 0 ? context + ahead - 1 : -1;
  }
  // A tree deeper than it may be has a longer tail: what its nodes hold is read there alone.
  __device__ int body() const {
    const int most = max(position - kTail + 1, 0);
    return chain || position < 0 ? most : min(most, context);
  }
  __device__ int slot(int at) const {
    if (chain || at < context) return at;
    uint64_t word = ancestors;
    for (int i = at - context; i > 0; --i) word &= word - 1;
    return context + __ffsll(static_cast<long long>(word)) - 1;
  }
};

// In the workspace: a part's weighted sum of latents, as bf16; its top and sum of weights.
__device__ inline Bf16* part_of(const LatentJob& job, int sequence, int row, int part) {
  const int64_t at = (int64_t{sequence} * job.rows() + row) * job.parts + part;
  return static_cast<Bf16*>(job.p.workspace) + at * kLatent;
}
__device__ inline float2* stats_of(const LatentJob& job, int sequence, int row, int part) {
  const Bf16* end = part_of(job, job.B, 0, 0);
  const int64_t at = (int64_t{sequence} * job.rows() + row) * job.parts + part;
  return reinterpret_cast<float2*>(const_cast<Bf16*>(end)) + at;
}

__device__ inline const Bf16* query_of(const LatentJob& job, int sequence, int row) {
  const int64_t first = (int64_t{job.b + sequence} * job.p.N + job.n) * job.p.H;
  return static_cast<const Bf16*>(job.p.q) + (first + row) * kWidth;
}

__device__ inline const Bf16* latent_of(const LatentJob& job, int sequence, int slot) {
  const int32_t* table = job.p.block_table + int64_t{job.b + sequence} * job.p.max_pages;
  return static_cast<const Bf16*>(job.p.cache) +
         (int64_t{table[slot / kPage]} * kPage + slot % kPage) * kWidth;
}

// The same of latents in FP8.
__device__ inline const uint8_t* fp8_latent_of(const LatentJob& job, int sequence, int slot) {
  const int32_t* table = job.p.block_table + int64_t{job.b + sequence} * job.p.max_pages;
  return static_cast<const uint8_t*>(job.p.cache) +
         (int64_t{table[slot / kPage]} * kPage + slot % kPage) * job.p.fp8_bytes;
}

// Eight features to shared memory, by a copy that is waited for where they are aligned.
__device__ inline void copy_chunk(Bf16* to, const Bf16* from, bool valid, bool aligned) {
  if (aligned) return copy_async(to, from, valid);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = valid ? from[i] : Bf16(0.f);
}

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// What a score's weight and the sums so far are taken relative to; finite where nothing is seen yet.
__device__ inline float base_of(float top) { return top == -INFINITY ? 0.f : top; }

// Two values as bf16.
__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Of four fragments' words, one for each thread of a quad, the four of the fragment that is this
// thread's: its 8 features.
__device__ inline int4 quad_transpose(const uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
  const uint32_t b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  const uint32_t low[] = {odd ? a : w[0], odd ? w[1] : a}, up[] = {odd ? b : w[2], odd ? w[3] : b};
  const uint32_t c = __shfl_xor_sync(~0u, high ? low[0] : up[0], 2);
  const uint32_t d = __shfl_xor_sync(~0u, high ? low[1] : up[1], 2);
  const auto word = [](uint32_t x) { return static_cast<int>(x); };
  return high ? int4{word(c), word(d), word(up[0]), word(up[1])}
              : int4{word(low[0]), word(low[1]), word(c), word(d)};
}

// A row's part to the workspace: rows 8 * half + lane / 4 of fragments.
template <int kNT>
__device__ inline void store_part(const float (&sums)[kNT][4], int half, Bf16* to, bool valid) {
#pragma unroll
  for (int n = 0; n < kNT; n += 4) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = pack(sums[n + i][2 * half], sums[n + i][2 * half + 1]);
    const int4 v = quad_transpose(w);
    if (valid) *reinterpret_cast<int4*>(to + 8 * (n + threadIdx.x % 4)) = v;
  }
}

// How the parts of a row tile are dealt to the blocks of its column of the grid: longest first, every
// second round backwards. -1: none in this round.
__device__ inline int part_of_round(int round, int splits) {
  const int y = blockIdx.y, turn = round % 2 ? gridDim.y - 1 - y : y;
  return splits - 1 - (round * static_cast<int>(gridDim.y) + turn);
}

}  // namespace kdtree::cuda
