// Row-invariant dot products of a block of rows and a block of outputs, accumulated in float32.
//
// The order of a sum follows from its number of inputs I and the weights' dtype alone. Inputs are
// taken in steps of kDotStep; warp n of a block takes the steps n, n + kDotWarps, ...
//
//   bf16 weights   lane 0: 0 .. 7   lane 1: 8 .. 15  ...  lane 31: 248 .. 255   16 bytes a lane
//   f32 weights    lane 0: 0 .. 3   lane 1: 4 .. 7   ...  lane 31: 124 .. 127   and 128 more
//
// A lane's 8 products of a step are one chain of fma, which is then added to the lane's sum; lanes
// are added by a butterfly, warps in order. A missing input counts as zero, a missing step adds
// zero. So no term passes more than 8 + ceil(I / (kDotStep * kDotWarps)) + log2(32) + kDotWarps
// roundings: 35 at I = 18432.
#pragma once

#include "common.cuh"

namespace kdtree::cuda {

inline constexpr int kDotWarps = 4;
inline constexpr int kDotThreads = kDotWarps * kWarp;
inline constexpr int kDotLane = 8;                 // inputs of a lane in a step
inline constexpr int kDotStep = kDotLane * kWarp;  // inputs

// Steps of weights that a warp has in flight: one row leaves registers for more.
template <int R>
inline constexpr int kDotAhead = R == 1 ? 2 : 1;

// Whether block_dot may read vectors at p and at every multiple of `stride` elements from it, given
// I. It gives the same bits either way.
template <class Element>
bool dot_aligned(const void* p, int64_t stride, int I) {
  return aligned<Element>(p, stride) && I % kDotLane == 0;
}

// This lane's inputs of the row at p in the step that begins at input i, as they are stored.
template <bool kAligned, int kVec, class Element>
struct Step {
  static constexpr int kRounds = kDotLane / kVec;
  struct alignas(kVec * sizeof(Element) < 16 ? kVec * sizeof(Element) : 16) Pack {
    Element v[kVec];
  } pack[kRounds];

  // Without a branch, so that the loads of many rows are in flight at once.
  __device__ void load(const Element* p, int i, int I) {
#pragma unroll
    for (int n = 0; n < kRounds; ++n) {
      const int at = first(i, n);
      if constexpr (kAligned) {
        pack[n] = *reinterpret_cast<const Pack*>(p + min(at, I - kVec));
      } else {
        for (int k = 0; k < kVec; ++k) pack[n].v[k] = p[min(at + k, I - 1)];
      }
    }
  }

  // In float32; zeros from input I on.
  __device__ void widen(int i, int I, float (&v)[kDotLane]) const {
#pragma unroll
    for (int n = 0; n < kRounds; ++n)
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        v[n * kVec + k] = first(i, n) + (kAligned ? 0 : k) < I ? float(pack[n].v[k]) : 0;
  }

  static __device__ int first(int i, int n) { return i + (n * kWarp + threadIdx.x % kWarp) * kVec; }
};

// Thread r * O + o of a block of kDotThreads returns x[r] . w[o] over I inputs, for r < R and o <
// O. All threads of the block must call it, with the same rows.
template <bool kAligned, int R, int O, class X, class W>
__device__ inline float block_dot(const X* const (&x)[R], const W* const (&w)[O], int I) {
  static_assert(R * O <= kDotThreads);
  constexpr int kVec = 16 / sizeof(W);
  const int warp = threadIdx.x / kWarp;

  float sum[R][O] = {};
  constexpr int kAhead = kDotAhead<R>, kStride = kDotWarps * kDotStep;
  for (int i = warp * kDotStep; i < I; i += kAhead * kStride) {
    Step<kAligned, kVec, W> steps[kAhead][O];
#pragma unroll
    for (int s = 0; s < kAhead; ++s)
#pragma unroll
      for (int o = 0; o < O; ++o) steps[s][o].load(w[o], i + s * kStride, I);
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      float b[O][kDotLane];
#pragma unroll
      for (int o = 0; o < O; ++o) steps[s][o].widen(i + s * kStride, I, b[o]);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        Step<kAligned, kVec, X> step;
        float a[kDotLane];
        step.load(x[r], i + s * kStride, I);
        step.widen(i + s * kStride, I, a);
#pragma unroll
        for (int o = 0; o < O; ++o) {
          float chain = 0;
          for (int k = 0; k < kDotLane; ++k) chain = fmaf(a[k], b[o][k], chain);
          sum[r][o] += chain;
        }
      }
    }
  }

  __shared__ float partial[kDotWarps][R * O];
  __syncthreads();  // an earlier call's sums have been read
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < O; ++o) {
      const float s = warp_sum(sum[r][o]);
      if (threadIdx.x % kWarp == 0) partial[warp][r * O + o] = s;
    }
  __syncthreads();  // all warps' sums are written
  float total = 0;
  if (threadIdx.x < R * O)
    for (int n = 0; n < kDotWarps; ++n) total += partial[n][threadIdx.x];
  return total;
}

}  // namespace kdtree::cuda
