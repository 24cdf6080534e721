// What the attention kernels share: rotation, exponentials, and loops over explicit lanes.
//
// The loops over lanes carry `unroll 1`, so that gcc turns each into one vector instruction instead
// of taking it apart; the loops around them are unrolled, so that the sums stay in registers.
#pragma once

#include <cmath>

#include "common.h"

namespace kdtree::cpu {

inline constexpr int kLanes = 16;  // floats of one zmm or two ymm registers

using Lanes = float[kLanes];

// n rounded up to whole lanes.
inline int whole_lanes(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

// y = x rotated by one row of the table, in float32 and rounded once: the pairs (2i, 2i + 1) in
// place where interleaved, else (i, i + R/2).
template <class Element, class Rotated>
void rotate(const Element* x, const float* table, int R, bool interleaved, Rotated* y) {
  const int half = R / 2;
  for (int i = 0; i < half; ++i) {
    const int first = interleaved ? 2 * i : i;
    const int second = interleaved ? 2 * i + 1 : i + half;
    const float a = x[first], b = x[second], cosine = table[i], sine = table[half + i];
    y[first] = Rotated(a * cosine - b * sine);
    y[second] = Rotated(a * sine + b * cosine);
  }
}

// wide = x in float32, followed by zeros up to whole lanes.
template <class Element>
[[gnu::always_inline]] inline void widen(const Element* x, int n, float* wide) {
  const int whole = n / kLanes * kLanes;
#pragma GCC unroll 1
  for (int i = 0; i < whole; i += kLanes)
#pragma GCC unroll 1
    for (int l = 0; l < kLanes; ++l) wide[i + l] = x[i + l];
  if (whole == n) return;
#pragma GCC unroll 1
  for (int l = 0; l < kLanes; ++l) wide[whole + l] = whole + l < n ? float(x[whole + l]) : 0.f;
}

// The sum of the lanes, the upper half added to the lower again and again.
[[gnu::always_inline]] inline float tree_sum(Lanes& v) {
#pragma GCC unroll 1
  for (int l = 0; l < 8; ++l) v[l] += v[l + 8];
#pragma GCC unroll 1
  for (int l = 0; l < 4; ++l) v[l] += v[l + 4];
  return (v[0] + v[2]) + (v[1] + v[3]);
}

// 2^x for x <= 0, off by two units in the last place; 0 below 2^-126, NaN at NaN. The Taylor series
// of 2^f, |f| <= 1/2, ends at ln(2)^7 / 7!: the next term is below 2^-27.
[[gnu::always_inline]] inline float exp2_negative(float x) {
  constexpr float kLowest = -126;
  constexpr float kRound = 12582912;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  constexpr int kRoundBits = 0x4b400000, kBias = 127, kMantissa = 23;
  const float rounded = (x < kLowest ? kLowest : x) + kRound;
  const float f = (x < kLowest ? kLowest : x) - (rounded - kRound);
  float y = 1.5252733804e-5f;
  y = std::fma(y, f, 1.5403530393e-4f);
  y = std::fma(y, f, 1.3333558146e-3f);
  y = std::fma(y, f, 9.6181291076e-3f);
  y = std::fma(y, f, 5.5504108665e-2f);
  y = std::fma(y, f, 2.4022650696e-1f);
  y = std::fma(y, f, 6.9314718056e-1f);
  y = std::fma(y, f, 1.f);
  const int exponent = std::bit_cast<int32_t>(rounded) - kRoundBits + kBias;
  const float power = std::bit_cast<float>(exponent << kMantissa);
  return x < kLowest ? 0.f : y * power;
}

[[gnu::always_inline]] inline float larger(float a, float b) { return a > b ? a : b; }

// out[k] = x . y[k] for K rows y, `width` apart and a whole number of lanes wide. K sums in flight
// hide the latency of fma; each one's order depends on the width alone.
template <int K>
[[gnu::always_inline]] inline void dots(const float* x, const float* y, int width, float* out) {
  Lanes sum[K] = {};
#pragma GCC unroll 1
  for (int i = 0; i < width; i += kLanes)
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k)
#pragma GCC unroll 1
      for (int l = 0; l < kLanes; ++l)
        sum[k][l] = std::fma(x[i + l], y[int64_t{k} * width + i + l], sum[k][l]);
#pragma GCC unroll 8
  for (int k = 0; k < K; ++k) out[k] = tree_sum(sum[k]);
}

}  // namespace kdtree::cpu
