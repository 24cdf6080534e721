// Routing.
//
//   s = scoring(logits[t]); c = s + bias; ids[t] = the K best c of the kept_groups best groups;
//   weights[t] = s[ids[t]], normalized and scaled
//
// Grid    one warp per row: every sum is over a row alone, in an order that E, groups and K fix.
// Smem    a row's scores, its keys (below) and its groups' keys.
// Reads   logits and bias once.
// Floor   4 * T * E bytes: nothing. K rounds of E / 32 shared loads and two warp reductions: about
//         2 us at E = 384, K = 8, bound by latency.
// Needs   1 <= K <= the experts of the kept groups.
#include <climits>
#include <cmath>

#include "common.cuh"

namespace kdtree::cuda {
namespace {

// Orders as the float does, with both zeros alike and NaN as -inf. No float's key is 0: that marks
// what is taken or masked, so that even a row of nothing but -inf chooses among the open ones.
__device__ uint32_t key_of(float c) {
  const uint32_t sign = 0x80000000u, bits = __float_as_uint(isnan(c) ? -INFINITY : c + 0.0f);
  return bits & sign ? ~bits : bits | sign;
}

// The largest of key[0 .. n - 1], the lowest index of a tie, which is set to 0.
__device__ int take_best(uint32_t* key, int n) {
  const int lane = threadIdx.x;
  uint32_t best = 0;
  int at = INT_MAX;
  for (int i = lane; i < n; i += kWarp) {
    if (key[i] > best) best = key[i], at = i;
  }
  const uint32_t top = __reduce_max_sync(~0u, best);
  at = __reduce_min_sync(~0u, best == top ? at : INT_MAX);
  if (lane == at % kWarp) key[at] = 0;  // the lane that alone reads it
  return at;
}

__device__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));  // does not overflow, and keeps a small score's precision
  return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}

__device__ void softmax(const float* logits, int E, float* s) {
  float top = -INFINITY, sum = 0;
  for (int e = threadIdx.x; e < E; e += kWarp) top = fmaxf(top, logits[e]);
  for (int d = kWarp / 2; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  for (int e = threadIdx.x; e < E; e += kWarp) {
    s[e] = expf(logits[e] - top);
    sum += s[e];
  }
  sum = warp_sum(sum);
  for (int e = threadIdx.x; e < E; e += kWarp) s[e] /= sum;
}

__device__ float choice(const MoeRouteParams& p, const float* score, int e) {
  const float c = p.bias ? score[e] + p.bias[e] : score[e];
  return isnan(c) ? -INFINITY : c;
}

__device__ float group_score(const MoeRouteParams& p, const float* score, int first, int size) {
  float best = -INFINITY, second = -INFINITY;
  for (int e = first; e < first + size; ++e) {
    const float c = choice(p, score, e);
    second = fmaxf(second, fminf(best, c));
    best = fmaxf(best, c);
  }
  return p.group_sum2 && size > 1 ? best + second : best;
}

__global__ void __launch_bounds__(kWarp)
    moe_route_kernel(const __grid_constant__ MoeRouteParams p) {
  const int64_t t = blockIdx.x;
  const int lane = threadIdx.x, size = p.E / p.groups;
  const float* logits = p.logits + t * p.E;
  int32_t* ids = p.ids + t * p.K;
  float* weights = p.weights + t * p.K;
  if (p.position && p.position[t] < 0) {
    for (int k = lane; k < p.K; k += kWarp) ids[k] = -1, weights[k] = 0;
    return;
  }

  extern __shared__ uint32_t smem[];
  uint32_t *key = smem, *group_key = key + p.E;
  auto *score = reinterpret_cast<float*>(group_key + p.groups), *picked = score + p.E;
  if (p.scoring == Scoring::softmax) {
    softmax(logits, p.E, score);
  } else {
    for (int e = lane; e < p.E; e += kWarp) score[e] = sigmoid(logits[e]);
  }
  __syncwarp();  // groups are read across lanes

  if (p.groups > 1) {
    for (int g = lane; g < p.groups; g += kWarp)
      group_key[g] = key_of(group_score(p, score, g * size, size));
    for (int i = 0; i < p.kept_groups; ++i) take_best(group_key, p.groups);
    __syncwarp();  // a kept group's key is 0 from here on, for every lane
  }
  for (int e = lane; e < p.E; e += kWarp) {
    const bool open = p.groups == 1 || group_key[e / size] == 0;
    key[e] = open ? key_of(choice(p, score, e)) : 0;
  }

  float sum = 0;
  for (int k = 0; k < p.K; ++k) {
    const int best = take_best(key, p.E);
    sum += score[best];
    if (lane == 0) ids[k] = best, picked[k] = score[best];
  }
  __syncwarp();
  for (int k = lane; k < p.K; k += kWarp)
    weights[k] = (p.normalize ? picked[k] / (sum + 1e-20f) : picked[k]) * p.scale;
}

}  // namespace

void moe_route(const MoeRouteParams& p, Stream stream) {
  constexpr int kMost = 4 * 1024 * static_cast<int>(sizeof(float));  // E, groups, K <= 1024
  const int words = 2 * p.E + p.groups + p.K;
  launch(moe_route_kernel, {p.T, kWarp, smem_up_to<kMost>(words * sizeof(float))}, stream, p);
}

}  // namespace kdtree::cuda
