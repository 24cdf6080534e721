// What sample, top_logprobs and draft_logits share: the order of a row's logits, its sum of
// exponentials, and the noise of its ids.
//
// Masses are sums of exp(x - max) in fixed point, in units of 2^-40. Integers add up to the same
// bits in any order, so a mass depends on nothing but the row's values, and 2^24 of them fit 64
// bits. exp and log are written out with explicit fmas: they have the same bits in every clone.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace kdtree::cpu {

inline constexpr float kMassUnits = 1099511627776.f;  // 2^40
inline constexpr int kNoiseWords = 4;                 // ids that share one Philox block
inline constexpr int kNoiseBlocks = 16;               // Philox blocks drawn together
inline constexpr int kNoiseIds = kNoiseBlocks * kNoiseWords;

// Grows with x; NaN is above everything, the zeros are equal.
inline uint32_t order_key(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (x != x) return ~0u;
  if (x == 0) return 1u << 31;
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

// Grows from worse to better: by value, ties to the lower id.
inline uint64_t rank_of(float x, int id) { return uint64_t{order_key(x)} << 32 | ~uint32_t(id); }

inline int id_of(uint64_t rank) { return static_cast<int>(~static_cast<uint32_t>(rank)); }

inline float value_of(uint64_t rank) {
  const auto key = static_cast<uint32_t>(rank >> 32);
  return std::bit_cast<float>(key >> 31 ? key ^ 1u << 31 : ~key);
}

// exp(x) for x <= 0, within 2 roundings; from -30 down it stays exp(-30), whose mass is 0.
[[gnu::always_inline]] inline float exp_negative(float x) {
  constexpr float kLog2e = 0x1.715476p0f, kLn2High = 0x1.62e400p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer
  x = x > -30.f ? x : -30.f;
  const float n = std::fma(x, kLog2e, kRound) - kRound;
  const float r = std::fma(n, -kLn2Low, std::fma(n, -kLn2High, x));
  float q = 0x1.6a2352p-10f;
  q = std::fma(q, r, 0x1.123a6cp-7f);
  q = std::fma(q, r, 0x1.5558f4p-5f);
  q = std::fma(q, r, 0x1.555490p-3f);
  q = std::fma(q, r, 0x1.fffffcp-2f);
  const float e = 1.f + std::fma(r * r, q, r);
  return std::bit_cast<float>(std::bit_cast<int32_t>(e) + static_cast<int32_t>(n) * (1 << 23));
}

// log(x) for normal x > 0, within 2 roundings, near 1 too.
[[gnu::always_inline]] inline float log_positive(float x) {
  constexpr float kLn2High = 0x1.62e400p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  constexpr int32_t kRootHalf = 0x3f3504f3;  // x = 2^n (1 + f) with 1 + f in sqrt(1/2) .. sqrt(2)
  const auto bits = std::bit_cast<int32_t>(x);
  const int32_t n = (bits - kRootHalf) >> 23;
  const float f = std::bit_cast<float>(bits - n * (1 << 23)) - 1.f;
  float q = -0x1.383d46p-4f;
  q = std::fma(q, f, 0x1.0852b8p-3f);
  q = std::fma(q, f, -0x1.0f39ecp-3f);
  q = std::fma(q, f, 0x1.227040p-3f);
  q = std::fma(q, f, -0x1.5426fcp-3f);
  q = std::fma(q, f, 0x1.99a400p-3f);
  q = std::fma(q, f, -0x1.000428p-2f);
  q = std::fma(q, f, 0x1.555550p-2f);
  q = std::fma(q, f, -0x1.fffff8p-2f);
  const float exponent = static_cast<float>(n);
  const float small = std::fma(f * f, q, exponent * kLn2Low);
  return std::fma(exponent, kLn2High, f + small);
}

// The mass of one entry: exp(below) in units of 2^-40, to nearest even.
[[gnu::always_inline]] inline uint64_t mass_of(float below) {
  constexpr double kRound = 0x1p52;  // adding it leaves the integer in the low bits
  const double units = static_cast<double>(exp_negative(below) * kMassUnits);
  return std::bit_cast<uint64_t>(units + kRound) - std::bit_cast<uint64_t>(kRound);
}

// The largest of a row, NaN where it holds one.
float row_max(const float* x, int W);

// The sum of exp(x[i] - max) in units of 2^-40.
uint64_t row_mass(const float* x, int W, float max);

// What fixes a row's noise.
struct Noise {
  uint64_t seed, position;  // of the drawn token
};

// The Gumbel noise of ids 4 first .. 4 first + 63; id 4 (first + i) + j is at noise[j][i].
// Philox4x32-10: key = seed, counter = (id / 4, position, 0), word id % 4.
void gumbel(Noise at, uint32_t first, float (*noise)[kNoiseBlocks]);

// log(sum of exp(x - max)) of a row of this mass.
inline double log_of(uint64_t mass) {
  return std::log(static_cast<double>(mass) / double(kMassUnits));
}

// x - logsumexp(row). NaN where the row holds a NaN, a +inf or nothing but -inf.
inline float logprob_of(float x, float max, uint64_t mass) {
  if (!(std::abs(max) < INFINITY)) return NAN;
  return static_cast<float>(double(x) - double(max) - log_of(mass));
}

}  // namespace kdtree::cpu
