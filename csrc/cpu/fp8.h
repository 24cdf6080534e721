// FP8 latents: see attention.h. The conversions are written out in integers, so that they are the
// same on every machine.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "common.h"

namespace kdtree::cpu {

// The nearest e4m3, ties to the even code, at most 448 in size; NaN is 0x7f.
inline uint8_t to_e4m3(float x) {
  constexpr int kBias = 7, kMantissa = 3, kFloatBias = 127, kFloatMantissa = 23;
  constexpr int kDropped = kFloatMantissa - kMantissa;
  constexpr uint32_t kInfinity = 0x7f800000;
  const auto bits = std::bit_cast<uint32_t>(x), size = bits & 0x7fffffff;
  const uint32_t sign = bits >> 24 & 0x80;
  if (size > kInfinity) return 0x7f;
  if (size >= std::bit_cast<uint32_t>(kFp8Max)) return static_cast<uint8_t>(sign | 0x7e);
  const auto shifted = [](uint32_t value, int by) {  // to nearest even
    return (value + (1u << (by - 1)) - 1 + (value >> by & 1)) >> by;
  };
  if (size >> kFloatMantissa > kFloatBias - kBias) {
    const uint32_t code = shifted(size, kDropped) - (uint32_t{kFloatBias - kBias} << kMantissa);
    return static_cast<uint8_t>(sign | code);
  }
  // Below 2^-6 codes are multiples of 2^-9; half of one and less is 0.
  const int by = kFloatBias - kBias + kDropped + 1 - static_cast<int>(size >> kFloatMantissa);
  if (by > kFloatMantissa + 1) return static_cast<uint8_t>(sign);
  const uint32_t mantissa = (size & ((1u << kFloatMantissa) - 1)) | 1u << kFloatMantissa;
  return static_cast<uint8_t>(sign | shifted(mantissa, by));
}

// The value of every code.
inline constexpr auto kE4m3 = [] {
  std::array<float, 256> value{};
  for (int code = 0; code < 128; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    float x = exponent ? 8.f + mantissa : 1.f * mantissa;  // in units of 2^-9
    for (int e = 1; e < exponent; ++e) x *= 2;
    x = code == 0x7f ? std::numeric_limits<float>::quiet_NaN() : x / 512;
    value[code] = x;
    value[code + 128] = -x;
  }
  return value;
}();

// The scale of a latent whose largest size is `most`.
inline float fp8_scale(float most) {
  const float scale = most / kFp8Max;
  return scale == 0 ? 1.f : scale;
}

// What stands behind a row's codes.
inline float load_scale(const uint8_t* row, int C) {
  float scale;
  std::memcpy(&scale, row + C, sizeof scale);
  return scale;
}
inline bf16* rope_of(uint8_t* row, int C) { return reinterpret_cast<bf16*>(row + C + kFp8Align); }
inline const bf16* rope_of(const uint8_t* row, int C) {
  return reinterpret_cast<const bf16*>(row + C + kFp8Align);
}

}  // namespace kdtree::cpu
