// The INT4 product that int4_linear and moe_experts share, on CUDA cores, for any shape.
//
// A warp multiplies a tile (32 outputs x 32 inputs) by R rows: lane (g, t) holds the codes of the
// outputs 8 * o + g, o < 4, and of the inputs 8 * j + 2 * t and the one after, j < 4. So its sums
// are over its own inputs; the four lanes t of an output are added at the end.
#pragma once

#include "common.cuh"

namespace kdtree::cuda {

inline constexpr int kInt4Outputs = 4;  // of a lane
inline constexpr int kInt4Inputs = 8;   // of a lane

// Code - 8 of a nibble: 2^23 + code is a float whose low bits are the code.
__device__ inline float int4_value(uint32_t word, int nibble) {
  return __uint_as_float(0x4b000000u | (word >> 4 * nibble & 15)) - (8388608.0f + 8.0f);
}

// The place of input i of a tile in a stage: a lane's inputs stand side by side, by t.
__device__ inline int int4_place(int i) { return i / 2 % 4 * kInt4Inputs + i / 8 * 2 + i % 2; }

// acc[r][o] += scale[o] * (this lane's codes of output o) . x[r], x: [R][kInt4Tile], each by place
template <int R>
__device__ inline void int4_tile(const uint4& w, const float (&scale)[kInt4Outputs], const float* x,
                                 float (&acc)[R][kInt4Outputs]) {
  const uint32_t word[2][2] = {{w.x, w.y}, {w.z, w.w}};
  float q[kInt4Outputs][kInt4Inputs];
#pragma unroll
  for (int o = 0; o < kInt4Outputs; ++o) {
#pragma unroll
    for (int i = 0; i < kInt4Inputs; ++i) {
      const int m = o / 2, row = o % 2, k = i / 4, column = i / 2 % 2, half = i % 2;
      q[o][i] = int4_value(word[m][k], 4 * half + 2 * column + row);
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const auto* v = reinterpret_cast<const float4*>(x + r * kInt4Tile) + threadIdx.x % 4 * 2;
    const float4 lo = v[0], hi = v[1];
    const float a[kInt4Inputs] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
    for (int o = 0; o < kInt4Outputs; ++o) {
      float sum = q[o][0] * a[0];
#pragma unroll
      for (int i = 1; i < kInt4Inputs; ++i) sum = fmaf(q[o][i], a[i], sum);
      acc[r][o] = fmaf(sum, scale[o], acc[r][o]);
    }
  }
}

// out[r][o], o < kInt4Tile: tiles first, first + step, ... of one tile row, times the rows x[r],
// by one warp. w: [tiles, 128]; scale: [tiles, 32]; stage: kAhead * R * kInt4Tile floats of the
// warp's own, on 16 bytes. kAhead tiles are loaded before the first is multiplied; the order of a
// sum depends on tiles, first and step alone.
template <int R, int kAhead, class Element>
__device__ inline void int4_tiles(const int32_t* w, const Element* scale, int tiles, int first,
                                  int step, const Element* const* x, float* stage, float* out) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, place = int4_place(lane);
  float acc[R][kInt4Outputs] = {};
  for (int tile = first; tile < tiles; tile += kAhead * step) {
    uint4 words[kAhead];
    float s[kAhead][kInt4Outputs], v[kAhead][R];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t i = tile + a * step;
      if (i >= tiles) continue;
      words[a] = reinterpret_cast<const uint4*>(w + i * kInt4Words)[lane];
#pragma unroll
      for (int o = 0; o < kInt4Outputs; ++o) s[a][o] = scale[i * kInt4Tile + 8 * o + g];
#pragma unroll
      for (int r = 0; r < R; ++r) v[a][r] = x[r][i * kInt4Tile + lane];
    }
    __syncwarp();  // the stage of the round before has been read
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
#pragma unroll
      for (int r = 0; r < R; ++r) stage[(a * R + r) * kInt4Tile + place] = v[a][r];
    __syncwarp();
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (tile + a * step < tiles) int4_tile<R>(words[a], s[a], stage + a * R * kInt4Tile, acc);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int o = 0; o < kInt4Outputs; ++o) {
      float sum = acc[r][o];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0) out[r * kInt4Tile + 8 * o + g] = sum;
    }
  }
}

}  // namespace kdtree::cuda
