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

[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void gumbel(Noise at, uint32_t first, float (*noise)[kNoiseBlocks]) {
  uint32_t c[kNoiseWords][kNoiseBlocks];
  for (int i = 0; i < kNoiseBlocks; ++i) {
    c[0][i] = first + i;
    c[1][i] = static_cast<uint32_t>(at.position);
    c[2][i] = static_cast<uint32_t>(at.position >> 32);
    c[3][i] = 0;
  }
  uint32_t key0 = static_cast<uint32_t>(at.seed), key1 = static_cast<uint32_t>(at.seed >> 32);
  for (int round = 0; round < 10; ++round, key0 += 0x9e3779b9u, key1 += 0xbb67ae85u) {
    for (int i = 0; i < kNoiseBlocks; ++i) {
      const uint64_t a = uint64_t{0xd2511f53u} * c[0][i], b = uint64_t{0xcd9e8d57u} * c[2][i];
      c[0][i] = static_cast<uint32_t>(b >> 32) ^ c[1][i] ^ key0;
      c[1][i] = static_cast<uint32_t>(b);
      c[2][i] = static_cast<uint32_t>(a >> 32) ^ c[3][i] ^ key1;
      c[3][i] = static_cast<uint32_t>(a);
    }
  }
  for (int j = 0; j < kNoiseWords; ++j) {
    for (int i = 0; i < kNoiseBlocks; ++i) {
      const float u = (static_cast<float>(static_cast<int32_t>(c[j][i] >> 9)) + .5f) * 0x1p-23f;
      noise[j][i] = -log_positive(-log_positive(u));
    }
  }
}

}  // namespace kdtree::cpu
