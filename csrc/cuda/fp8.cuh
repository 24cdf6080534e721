// FP8 latents: see attention.h.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

namespace kdtree::cuda {

// The nearest e4m3, ties to the even code, at most 448 in size; NaN is 0x7f.
__device__ inline uint8_t to_e4m3(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

// Two codes, the lower byte first; exact.
__device__ inline float2 from_e4m3(uint32_t two) {
  const auto codes = static_cast<__nv_fp8x2_storage_t>(two);
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3)));
}

// Four codes times the scale, as bfloat16.
__device__ inline uint2 widen_four(uint32_t codes, float scale) {
  const float2 low = from_e4m3(codes & 0xffff), high = from_e4m3(codes >> 16);
  const __nv_bfloat162 a = __floats2bfloat162_rn(low.x * scale, low.y * scale);
  const __nv_bfloat162 b = __floats2bfloat162_rn(high.x * scale, high.y * scale);
  return {reinterpret_cast<const uint32_t&>(a), reinterpret_cast<const uint32_t&>(b)};
}
__device__ inline uint4 widen_eight(uint2 codes, float scale) {
  const uint2 low = widen_four(codes.x, scale), high = widen_four(codes.y, scale);
  return {low.x, low.y, high.x, high.y};
}

// The scale of a latent whose largest size is `most`.
__device__ inline float fp8_scale(float most) {
  const float scale = most / kFp8Max;
  return scale == 0 ? 1.f : scale;
}

// What stands behind the codes of a row.
__device__ inline float* scale_of(uint8_t* row, int C) { return reinterpret_cast<float*>(row + C); }
__device__ inline const float* scale_of(const uint8_t* row, int C) {
  return reinterpret_cast<const float*>(row + C);
}
__device__ inline __nv_bfloat16* rope_of(uint8_t* row, int C) {
  return reinterpret_cast<__nv_bfloat16*>(row + C + kFp8Align);
}
__device__ inline const __nv_bfloat16* rope_of(const uint8_t* row, int C) {
  return reinterpret_cast<const __nv_bfloat16*>(row + C + kFp8Align);
}

}  // namespace kdtree::cuda
