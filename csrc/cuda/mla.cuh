// What the kernels over the latent cache share.
#pragma once

#include "common.cuh"

namespace kdtree::cuda {

// Pair i of a row to be rotated by one row of the table (R/2 cosines, R/2 sines), in float32 and rounded
// once: the pairs (2i, 2i + 1) in place where interleaved, else (i, i + R/2).
struct Pair {
  float a, b, cosine, sine;
  int first, second;

  template <class Element>
  __device__ void load(const Element* x, const float* table, int R, bool interleaved, int i) {
    const int half = R / 2;
    first = interleaved ? 2 * i : i;
    second = interleaved ? 2 * i + 1 : i + half;
    a = float(x[first]), b = float(x[second]);
    cosine = table[i], sine = table[half + i];
  }
  template <class Rotated>
  __device__ void store(Rotated* y) const {
    y[first] = Rotated(a * cosine - b * sine);
    y[second] = Rotated(a * sine + b * cosine);
  }
};
template <class Element, class Rotated>
__device__ inline void rotate_pair(const Element* x, const float* table, int R, bool interleaved,
                                   int i, Rotated* y) {
  Pair pair;
  pair.load(x, table, R, interleaved, i);
  pair.store(y);
}

// Leaves in x[0] of lane i the sum over all lanes of x[i]. Every sum has the same order: lanes 16
// apart, then 8, 4, 2, 1. A template, because a loop over d would keep x in local memory.
template <int d = kWarp / 2>
__device__ __forceinline__ void warp_sums(float (&x)[kWarp]) {
  const bool upper = threadIdx.x & d;
#pragma unroll
  for (int i = 0; i < d; ++i) {
    const float keep = upper ? x[i + d] : x[i];
    const float send = upper ? x[i] : x[i + d];
    x[i] = keep + __shfl_xor_sync(~0u, send, d);
  }
  if constexpr (d > 1) warp_sums<d / 2>(x);
}

}  // namespace kdtree::cuda
