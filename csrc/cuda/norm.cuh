// The RMS norm of one row by one block, for the ops that norm.
#pragma once

#include "common.cuh"

namespace kdtree::cuda {

// The features that a thread takes at a time: 16 bytes, or the same ones singly if not aligned.
template <class Element>
inline constexpr int kNormVec = 16 / sizeof(Element);
template <class Element>
using NormVector = float[kNormVec<Element>];

// Calls f with the threads of a row's block, a constant: one vector each, where that is enough.
template <class Element, class F>
void dispatch_norm_threads(int D, F&& f) {
  const bool wide = ceil_div(D, kNormVec<Element>) > 256;
  dispatch<256, 1024>(wide ? 1024 : 256, "threads", f);
}

// 1 / sqrt(mean(x^2) + eps), where `sum` is the thread's part of the sum of squares. The order of
// the sum follows from D and the dtype alone: vectors of a thread, lanes of a warp, warps.
template <int kThreads>
__device__ inline float norm_scale(float sum, int D, float eps) {
  __shared__ float partial[kThreads / kWarp];
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
  __syncthreads();  // the warps' sums are written
  sum = 0;
#pragma unroll
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

// y = x / sqrt(mean(x^2) + eps) * w for one row. read(d, v): x from feature d on, once for each;
// again(d, v): once more. A thread's first vector, and its weights, wait in registers.
template <int kThreads, bool kAligned, class Element, class Read, class Again>
__device__ inline void norm_row(int D, float eps, const Element* w, Element* y, Read read,
                                Again again) {
  constexpr int kVec = kNormVec<Element>, kStep = kThreads * kVec;
  const int first = threadIdx.x * kVec;
  NormVector<Element> x = {}, weight = {}, v;
  if (first < D) {
    read(first, x);
    load<kAligned>(w + first, D - first, weight);
  }
  float sum = squares(x);
  for (int d = first + kStep; d < D; d += kStep) {
    read(d, v);
    sum += squares(v);
  }
  const float scale = norm_scale<kThreads>(sum, D, eps);
  for (int i = 0; i < kVec; ++i) x[i] = x[i] * scale * weight[i];
  if (first < D) store<kAligned>(y + first, D - first, x);
  for (int d = first + kStep; d < D; d += kStep) {
    again(d, v);
    load<kAligned>(w + d, D - d, weight);
    for (int i = 0; i < kVec; ++i) v[i] = v[i] * scale * weight[i];
    store<kAligned>(y + d, D - d, v);
  }
}

}  // namespace kdtree::cuda
