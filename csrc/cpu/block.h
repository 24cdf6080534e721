// What the CPU kernels of a drafter's block share: the norm and rotation of one head.
#pragma once

#include <algorithm>
#include <cmath>

#include "common.h"

namespace kdtree::cpu {

// y = x / sqrt(mean(x^2) + eps) * w, rotated by the table's row of a position: the pairs (i, i +
// width / 2). Everything in float32 or better; y is rounded once.
template <class Element, class Out>
[[gnu::always_inline]] inline void turn(const Element* x, const Element* w, const float* rope,
                                        int positions, int64_t position, int width, float eps,
                                        Out* y) {
  const int half = width / 2;
  const float* cosine = rope + std::clamp<int64_t>(position, 0, positions - 1) * width;
  const float* sine = cosine + half;
  double first = 0, second = 0;
  for (int i = 0; i < half; ++i) {
    first += double(x[i]) * x[i];  // the product of two floats is exact
    second += double(x[half + i]) * x[half + i];
  }
  const auto scale = static_cast<float>(1 / std::sqrt((first + second) / width + eps));
  for (int i = 0; i < half; ++i) {
    const float a = float(x[i]) * scale * float(w[i]);
    const float b = float(x[half + i]) * scale * float(w[half + i]);
    y[i] = Out(a * cosine[i] - b * sine[i]);
    y[half + i] = Out(b * cosine[i] + a * sine[i]);
  }
}

}  // namespace kdtree::cpu
