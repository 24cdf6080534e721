// What sample, top_logprobs and draft_logits share: a team of blocks that reads one row of logits,
// the order of its ids, its sum of exponentials, and the noise of its ids.
//
// A row belongs to a cluster of kTeam blocks, so that a few rows keep many SMs busy. Every number
// that crosses threads or blocks is an integer under max or add, so no result depends on who read
// what. Masses are sums of exp(x - max) in units of 2^-40; 2^24 of them fit 64 bits. exp and log
// are written out with explicit fmas: they have the same bits as the CPU's.
#pragma once

#include <cooperative_groups.h>

#include "common.cuh"

namespace kdtree::cuda {

inline constexpr int kTeam = 8;  // blocks a row: the largest portable cluster
inline constexpr int kRowThreads = 512;
inline constexpr int kAhead = 5;    // quads of a thread on their way where little else is done
inline constexpr int kQuad = 4;  // ids read together; they also share a Philox block
inline constexpr float kMassUnits = 1099511627776.f;  // 2^40

// Grows with x; NaN is above everything, the zeros are equal.
__device__ inline uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? ~0u : x == 0 ? 1u << 31 : bits >> 31 ? ~bits : bits | 1u << 31;
}
__device__ inline float value_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 1u << 31 : ~key);
}

// Grows from worse to better: by value, ties to the lower id. 0 is below all ids of all rows.
__device__ inline uint64_t rank_of(float x, int id) {
  return uint64_t{order_key(x)} << 32 | ~static_cast<uint32_t>(id);
}

// exp(x) for x <= 0, within 2 roundings; from -30 down it stays exp(-30), whose mass is 0.
__device__ inline float exp_negative(float x) {
  constexpr float kLog2e = 0x1.715476p0f, kLn2High = 0x1.62e400p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer
  x = x > -30.f ? x : -30.f;
  const float n = fmaf(x, kLog2e, kRound) - kRound;
  const float r = fmaf(n, -kLn2Low, fmaf(n, -kLn2High, x));
  float q = 0x1.6a2352p-10f;
  q = fmaf(q, r, 0x1.123a6cp-7f);
  q = fmaf(q, r, 0x1.5558f4p-5f);
  q = fmaf(q, r, 0x1.555490p-3f);
  q = fmaf(q, r, 0x1.fffffcp-2f);
  const float e = 1.f + fmaf(r * r, q, r);
  return __int_as_float(__float_as_int(e) + static_cast<int>(n) * (1 << 23));
}

// log(x) for normal x > 0, within 2 roundings, near 1 too.
__device__ inline float log_positive(float x) {
  constexpr float kLn2High = 0x1.62e400p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  constexpr int kRootHalf = 0x3f3504f3;  // x = 2^n (1 + f) with 1 + f in sqrt(1/2) .. sqrt(2)
  const int bits = __float_as_int(x);
  const int n = (bits - kRootHalf) >> 23;
  const float f = __int_as_float(bits - n * (1 << 23)) - 1.f;
  float q = -0x1.383d46p-4f;
  q = fmaf(q, f, 0x1.0852b8p-3f);
  q = fmaf(q, f, -0x1.0f39ecp-3f);
  q = fmaf(q, f, 0x1.227040p-3f);
  q = fmaf(q, f, -0x1.5426fcp-3f);
  q = fmaf(q, f, 0x1.99a400p-3f);
  q = fmaf(q, f, -0x1.000428p-2f);
  q = fmaf(q, f, 0x1.555550p-2f);
  q = fmaf(q, f, -0x1.fffff8p-2f);
  const float exponent = static_cast<float>(n);
  const float small = fmaf(f * f, q, exponent * kLn2Low);
  return fmaf(exponent, kLn2High, f + small);
}

// The mass of one entry: exp(below) in units of 2^-40, to nearest even.
__device__ inline uint64_t mass_of(float below) {
  return __float2ull_rn(exp_negative(below) * kMassUnits);
}

// log(sum of exp(x - max)) of a row of this mass.
__device__ inline double log_of(uint64_t mass) {
  return log(static_cast<double>(mass) / double(kMassUnits));
}

// x - logsumexp(row). NaN where the row holds a NaN, a +inf or nothing but -inf.
__device__ inline float logprob_of(float x, float max, uint64_t mass) {
  if (!(fabsf(max) < INFINITY)) return NAN;
  return static_cast<float>(double(x) - double(max) - log_of(mass));
}

// The words behind the noise of ids 4 quad .. 4 quad + 3 at position: 23 bits each.
__device__ inline void noise_words(uint64_t seed, uint64_t position, uint32_t quad,
                                   uint32_t (&c)[kQuad]) {
  c[0] = quad, c[1] = static_cast<uint32_t>(position), c[2] = position >> 32, c[3] = 0;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round, key0 += 0x9e3779b9u, key1 += 0xbb67ae85u) {
    const uint64_t a = uint64_t{0xd2511f53u} * c[0], b = uint64_t{0xcd9e8d57u} * c[2];
    c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ key0;
    c[1] = static_cast<uint32_t>(b);
    c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ key1;
    c[3] = static_cast<uint32_t>(a);
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) c[i] >>= 9;
}

__device__ inline float noise_of(uint32_t word) {
  const float u = (static_cast<float>(word) + .5f) * 0x1p-23f;
  return -log_positive(-log_positive(u));
}

// The Gumbel noise of ids 4 quad .. 4 quad + 3 at position.
__device__ inline void gumbel(uint64_t seed, uint64_t position, uint32_t quad,
                              float (&noise)[kQuad]) {
  uint32_t word[kQuad];
  noise_words(seed, position, quad, word);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) noise[i] = noise_of(word[i]);
}

inline __device__ auto team() { return cooperative_groups::this_cluster(); }

// Calls f(id, x) for each quad of ids id .. id + 3 of the block's share of a row; past the row's
// end x is -inf. kLoads quads are loaded before the first of them is used.
template <int kLoads = 1, class F>
__device__ void for_share(const float* row, int W, F f) {
  const int quads = (W + kQuad - 1) / kQuad, share = (quads + kTeam - 1) / kTeam;
  const int begin = team().block_rank() * share, end = min(begin + share, quads);
  const bool aligned = reinterpret_cast<uintptr_t>(row) % sizeof(float4) == 0;
  const auto load = [&](int quad, float(&x)[kQuad]) {
    const int id = quad * kQuad;
    if (aligned && id + kQuad <= W) {
      const float4 v = reinterpret_cast<const float4*>(row)[quad];
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) x[i] = id + i < W ? row[id + i] : -INFINITY;
    }
  };
  for (int quad = begin + threadIdx.x; quad < end; quad += kLoads * kRowThreads) {
    float x[kLoads][kQuad];
#pragma unroll
    for (int a = 0; a < kLoads; ++a) load(quad + a * kRowThreads, x[a]);
#pragma unroll
    for (int a = 0; a < kLoads; ++a)
      if (quad + a * kRowThreads < end) f((quad + a * kRowThreads) * kQuad, x[a]);
  }
}

// op over the values of all threads of the team, for an op that takes any order.
template <class Op>
__device__ uint64_t team_reduce(uint64_t x, Op op) {
  constexpr int kWarps = kRowThreads / kWarp;
  __shared__ uint64_t partial[kWarps], block;
  for (int d = kWarp / 2; d > 0; d /= 2) x = op(x, __shfl_xor_sync(~0u, x, d));
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    x = partial[0];
    for (int w = 1; w < kRowThreads / kWarp; ++w) x = op(x, partial[w]);
    block = x;
  }
  team().sync();
  x = *team().map_shared_rank(&block, 0);
  for (int r = 1; r < kTeam; ++r) x = op(x, *team().map_shared_rank(&block, r));
  team().sync();  // before anyone writes block again or leaves
  return x;
}
__device__ inline uint64_t team_max(uint64_t x) {
  return team_reduce(x, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}
__device__ inline uint64_t team_sum(uint64_t x) {
  return team_reduce(x, [](uint64_t a, uint64_t b) { return a + b; });
}

// The rank of a row's largest logit, in all threads of the team.
__device__ __noinline__ inline uint64_t row_best(const float* row, int W) {
  uint64_t best = 0;
  for_share<kAhead>(row, W, [&](int id, const float (&x)[kQuad]) {
    for (int i = 0; i < kQuad; ++i) best = max(best, rank_of(x[i], id + i));
  });
  return team_max(best);
}

// This thread's part of a row's mass.
__device__ __noinline__ inline uint64_t share_mass(const float* row, int W, float max) {
  uint64_t mass = 0;
  for_share<kAhead>(row, W, [&](int, const float (&x)[kQuad]) {
    for (int i = 0; i < kQuad; ++i) mass += mass_of(x[i] - max);
  });
  return mass;
}

}  // namespace kdtree::cuda
