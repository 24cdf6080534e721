// What the kernels of a drafter's block share: the norm and rotation of one head.
#pragma once

#include "common.cuh"

namespace kdtree::cuda {

// Calls store(i, y) for each feature of y = x / sqrt(mean(x^2) + eps) * w, rotated by the table's
// row of a position: the pairs (i, i + width / 2), in float32. All lanes of a warp call it; the
// order of the sum follows from the width alone.
template <class Element, class Store>
__device__ inline void turn(const Element* x, const Element* w, const float* rope, int positions,
                            int64_t position, int width, float eps, Store store) {
  const int lane = threadIdx.x % kWarp, half = width / 2;
  float sum = 0;
  for (int i = lane; i < half; i += kWarp) {
    const float a = float(x[i]), b = float(x[half + i]);
    sum = fmaf(b, b, fmaf(a, a, sum));
  }
  const float scale = 1.f / sqrtf(warp_sum(sum) / width + eps);
  const float* cosine = rope + max(min(position, int64_t{positions - 1}), int64_t{0}) * width;
  for (int i = lane; i < half; i += kWarp) {
    const float a = float(x[i]) * scale * float(w[i]);
    const float b = float(x[half + i]) * scale * float(w[half + i]);
    store(i, a * cosine[i] - b * cosine[half + i]);
    store(half + i, b * cosine[i] + a * cosine[half + i]);
  }
}

__device__ inline int64_t clamped_id(int64_t id, int W) {
  return max(min(id, int64_t{W - 1}), int64_t{0});
}

}  // namespace kdtree::cuda
