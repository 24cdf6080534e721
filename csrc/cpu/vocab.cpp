#include "vocab.h"

namespace kdtree::cpu {

[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
float row_max(const float* x, int W) {
  constexpr int kLanes = 64;
  float best[kLanes];
  int32_t nan[kLanes];
  for (int j = 0; j < kLanes; ++j) best[j] = -INFINITY, nan[j] = 0;
  int i = 0;
  for (; i + kLanes <= W; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
      nan[j] |= x[i + j] != x[i + j];
    }
  }
  for (int j = 0; i + j < W; ++j) {
    best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
    nan[j] |= x[i + j] != x[i + j];
  }
  float max = -INFINITY;
  for (int j = 0; j < kLanes; ++j) {
    if (nan[j]) return NAN;
    if (best[j] > max) max = best[j];
  }
  return max;
}

[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
uint64_t row_mass(const float* x, int W, float max) {
  uint64_t mass = 0;
  for (int i = 0; i < W; ++i) mass += mass_of(x[i] - max);
  return mass;
}

}  // namespace kdtree::cpu
