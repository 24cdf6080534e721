// The RMS norm of one row by one block, for the ops that norm.
#pragma once

#include "common.cuh"

namespace kdtree::cuda {

inline constexpr int kNormThreads = 256;

// The features that a thread takes at a time: 16 bytes, or the same ones singly if not aligned.
template <class Element>
inline constexpr int kNormVec = 16 / sizeof(Element);

// 1 / sqrt(mean(x^2) + eps), where `sum` is the thread's part of the sum of squares. The order of the
// sum follows from D alone: vectors of a thread, lanes of a warp, warps.
__device__ inline float norm_scale(float sum, int D, float eps) {
  __shared__ float partial[kNormThreads / kWarp];
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
  __syncthreads();  // the warps' sums are written
  sum = 0;
  for (float s : partial) sum += s;
  return 1.f / sqrtf(sum / D + eps);
}

// The sum of the squares of v, which starts anew with each vector: a short chain of roundings.
template <int N>
__device__ inline float squares(const float (&v)[N]) {
  float sum = 0;
  for (int i = 0; i < N; ++i) sum = fmaf(v[i], v[i], sum);
  return sum;
}

// y = x * scale * w from feature d on.
template <bool kAligned, class Element>
__device__ inline void norm_store(const float (&x)[kNormVec<Element>], const Element* w, Element* y,
                                  int d, int D, float scale) {
  float weight[kNormVec<Element>], out[kNormVec<Element>];
  load<kAligned>(w + d, D - d, weight);
  for (int i = 0; i < kNormVec<Element>; ++i) out[i] = x[i] * scale * weight[i];
  store<kAligned>(y + d, D - d, out);
}

}  // namespace kdtree::cuda
