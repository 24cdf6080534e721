// Routing.
//
//   s = scoring(logits[t]); c = s + bias; ids[t] = the K best c of the kept_groups best groups;
//   weights[t] = s[ids[t]], normalized and scaled
//
// Grid    one block a row, one thread an expert: a row's sums are over that row alone, in an order
//         that E and K fix.
// Tiling  A thread counts the experts of its warp that come before its own; the first K of each warp
//         meet, and of those a thread counts all that come before its own: its place. Nothing is
//         taken one by one.
// Smem    a row's scores, its keys (below), the best keys of its warps.
// Reads   logits and bias once.
// Floor   4 * T * E bytes: nothing. Launch, a read of memory and 32 + K * E / 32 comparisons a
//         thread: bound by latency.
// Needs   E <= kMaxExperts; 1 <= K <= the experts of the kept groups.
#include <cmath>

#include "common.cuh"

namespace kdtree::cuda {
namespace {

// What orders experts: the greater comes first. It orders as c does, with both zeros alike and NaN
// as -inf; of a tie the lower id is greater.
__device__ uint64_t key_of(float c, int id) {
  const uint32_t sign = 0x80000000u, bits = __float_as_uint(isnan(c) ? -INFINITY : c + 0.0f);
  return uint64_t{bits & sign ? ~bits : bits | sign} << 32 | ~static_cast<uint32_t>(id);
}

// Comes after every key_of, even of a row of nothing but -inf: no float has 0 in the upper half.
__device__ uint64_t closed_key(int id) { return ~static_cast<uint32_t>(id); }

__device__ int id_of(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }

// How many of key[0 .. n - 1], on 16 bytes, come before mine.
__device__ int place_of(uint64_t mine, const uint64_t* key, int n) {
  int before = 0;
#pragma unroll 8
  for (int i = 0; i < n / 2; ++i) {
    const ulonglong2 two = reinterpret_cast<const ulonglong2*>(key)[i];
    before += (two.x > mine) + (two.y > mine);
  }
  return n % 2 ? before + (key[n - 1] > mine) : before;
}

__device__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));  // does not overflow, and keeps a small score's precision
  return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}

// The softmax of expert e; s: [E], scratch. Every warp adds all of the row.
__device__ float softmax(const float* logits, int e, int E, float* s) {
  const int lane = e % kWarp;
  float top = -INFINITY, sum = 0;
  for (int i = lane; i < E; i += kWarp) top = fmaxf(top, logits[i]);
  for (int d = kWarp / 2; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float mine = e < E ? expf(logits[e] - top) : 0;
  if (e < E) s[e] = mine;
  __syncthreads();  // all are there
  for (int i = lane; i < E; i += kWarp) sum += s[i];
  sum = warp_sum(sum);
  __syncthreads();  // all are used up
  return mine / sum;
}

__device__ float group_score(const float* choice, int size, bool sum2) {
  float best = -INFINITY, second = -INFINITY;
  for (int i = 0; i < size; ++i) {
    const float c = isnan(choice[i]) ? -INFINITY : choice[i];
    second = fmaxf(second, fminf(best, c));
    best = fmaxf(best, c);
  }
  return sum2 && size > 1 ? best + second : best;
}

// Whether expert e is in a kept group. choice: [E], key: [groups], scratch.
__device__ bool is_open(const MoeRouteParams& p, int e, float c, float* choice, uint64_t* key) {
  const int size = p.E / p.groups;
  if (e < p.E) choice[e] = c;
  __syncthreads();  // the choice is there
  if (e < p.groups) key[e] = key_of(group_score(choice + e * size, size, p.group_sum2), e);
  __syncthreads();  // the groups' keys are there
  const bool open = e < p.E && place_of(key[e / size], key, p.groups) < p.kept_groups;
  __syncthreads();  // both are used up
  return open;
}

__global__ void __launch_bounds__(kMaxExperts)
    moe_route_kernel(const __grid_constant__ MoeRouteParams p) {
  const int64_t t = blockIdx.x;
  const int e = threadIdx.x;
  int32_t* ids = p.ids + t * p.K;
  float* weights = p.weights + t * p.K;
  if (p.position && p.position[t] < 0) {
    if (e < p.K) ids[e] = -1, weights[e] = 0;
    return;
  }

  __shared__ __align__(16) uint64_t key[kMaxExperts], best[kMaxExperts];
  __shared__ float score[kMaxExperts];
  const float* logits = p.logits + t * p.E;
  const float bias = p.bias && e < p.E ? p.bias[e] : 0;
  float s = 0;
  if (p.scoring == Scoring::softmax)
    s = softmax(logits, e, p.E, score);
  else if (e < p.E)
    s = sigmoid(logits[e]);
  score[e] = s;
  const float c = s + bias;
  bool open = e < p.E;
  if (p.groups > 1) open = is_open(p, e, c, reinterpret_cast<float*>(best), key);

  const uint64_t mine = open ? key_of(c, e) : closed_key(e);
  const int warp = e / kWarp, kept = min(p.K + p.K % 2, kWarp);  // of a warp; even: see place_of
  key[e] = mine;
  __syncwarp();  // the warp's keys are there
  const int place = place_of(mine, key + warp * kWarp, kWarp);
  if (place < kept) best[warp * kept + place] = mine;
  __syncthreads();  // the best are there, scores too; keys are used up
  auto* picked = reinterpret_cast<float*>(key);
  const int count = blockDim.x / kWarp * kept;
  if (e < count) {
    const int k = place_of(best[e], best, count);
    if (k < p.K) {
      ids[k] = id_of(best[e]);
      picked[k] = score[id_of(best[e])];
    }
  }
  __syncthreads();  // the picked scores are there
  if (e >= p.K) return;
  float sum = 0;
  for (int k = 0; k < p.K; ++k) sum += picked[k];
  weights[e] = (p.normalize ? picked[e] / (sum + 1e-20f) : picked[e]) * p.scale;
}

}  // namespace

void moe_route(const MoeRouteParams& p, Stream stream) {
  launch(moe_route_kernel, {p.T, ceil_div(p.E, kWarp) * kWarp}, stream, p);
}

}  // namespace kdtree::cuda
