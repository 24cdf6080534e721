// Routing.
//
//   s = scoring(logits[t]); c = s + bias; ids[t] = the K best c of the kept_groups best groups;
//   weights[t] = s[ids[t]], normalized and scaled
//
// Grid    one block a row, one thread an expert: a row's sums are over that row alone, in an order
//         that E and K fix.
// Tiling  Nothing is taken one by one: the place of an expert is the number of those that come
//         before it. Few are counted: the experts stand in at least 3/2 K runs of neighbours, and
//         what is below the K-th best of the runs' best is not among the K best of all. That leaves
//         little more than K, whose places are then counted; where all tie it leaves all.
// Smem    a row's scores, the runs' best, the experts that are left.
// Reads   logits and bias once.
// Floor   4 * T * E bytes: nothing. Launch, a read of memory, four barriers and about 4 K comparisons
//         a thread: bound by latency.
// Needs   E <= kMaxExperts, K <= kMaxExpertsPerToken; 1 <= K <= the experts of the kept groups.
#include <cmath>

#include "common.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kMaxRuns = 3 * kMaxExpertsPerToken;
constexpr int kIdBits = 10;
static_assert(kMaxExperts <= 1 << kIdBits);

// Orders as c does, with both zeros alike and NaN as -inf. No float's order is 0, that of an expert
// outside the kept groups: even a row of nothing but -inf chooses among the others.
__device__ uint32_t order_of(float c) {
  const uint32_t sign = 0x80000000u, bits = __float_as_uint(isnan(c) ? -INFINITY : c + 0.0f);
  return bits & sign ? ~bits : bits | sign;
}

// The greater key comes first: the greater order, of a tie the lower id.
__device__ uint64_t key_of(uint32_t order, int id) {
  return uint64_t{order} << kIdBits | (kMaxExperts - 1 - id);
}
__device__ uint32_t order_of_key(uint64_t key) { return static_cast<uint32_t>(key >> kIdBits); }
__device__ int id_of_key(uint64_t key) {
  return kMaxExperts - 1 - static_cast<int>(key & ((1 << kIdBits) - 1));
}

// 1 where other comes before mine. Keys are so small that a difference's top bit is its sign, which
// is cheaper to add up than what a comparison says.
__device__ int before(uint64_t other, uint64_t mine) {
  return static_cast<int>((mine - other) >> 63);
}

// How many of key[0 .. n - 1], on 16 bytes, come before mine.
__device__ int place_of(uint64_t mine, const uint64_t* key, int n) {
  int place = 0;
#pragma unroll 4
  for (int i = 0; i < n / 2; ++i) {
    const ulonglong2 two = reinterpret_cast<const ulonglong2*>(key)[i];
    place += before(two.x, mine) + before(two.y, mine);
  }
  return n % 2 ? place + before(key[n - 1], mine) : place;
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
  choice[e] = c;
  __syncthreads();  // the choice is there
  if (e < p.groups)
    key[e] = key_of(order_of(group_score(choice + e * size, size, p.group_sum2)), e);
  __syncthreads();  // the groups' keys are there
  const bool open = e < p.E && place_of(key[e / size], key, p.groups) < p.kept_groups;
  __syncthreads();  // both are used up
  return open;
}

template <bool kSoftmax, bool kGroups>
__global__ void __launch_bounds__(kMaxExperts)
    moe_route_kernel(const __grid_constant__ MoeRouteParams p) {
  begin_early();
  const int64_t t = blockIdx.x;
  const int e = threadIdx.x;
  const bool padded = p.position && p.position[t] < 0;  // routed all the same, and then forgotten
  const float* logits = p.logits + t * p.E;
  const float bias = p.bias && e < p.E ? p.bias[e] : 0;

  __shared__ __align__(16) uint64_t run[kMaxRuns], left[kMaxExperts];
  __shared__ float score[kMaxExperts], picked[kMaxExpertsPerToken];
  __shared__ uint32_t bound;
  __shared__ int count;
  float s = 0;
  if constexpr (kSoftmax)
    s = softmax(logits, e, p.E, score);
  else if (e < p.E)
    s = sigmoid(logits[e]);
  const bool open = kGroups ? is_open(p, e, s + bias, score, left) : e < p.E;
  score[e] = s;
  if (e == 0) count = 0;

  int width = kWarp;  // of a run
  while (width > 1 && 2 * blockDim.x < 3 * p.K * width) width /= 2;
  const uint32_t order = open ? order_of(s + bias) : 0;
  uint32_t best = order;
  if (width == kWarp)
    best = __reduce_max_sync(~0u, best);
  else
    for (int d = width / 2; d > 0; d /= 2) best = max(best, __shfl_xor_sync(~0u, best, d));
  const int runs = blockDim.x / width;
  if (e % width == 0) run[e / width] = key_of(best, e / width);
  __syncthreads();  // the runs' best are there, scores too
  if (e < runs && place_of(run[e], run, runs) == p.K - 1) bound = max(order_of_key(run[e]), 1u);
  __syncthreads();  // the bound is there
  if (order >= bound) left[atomicAdd(&count, 1)] = key_of(order, e);
  __syncthreads();  // what is left is there, in any order
  if (e < count) {
    const int k = place_of(left[e], left, count), id = id_of_key(left[e]);
    if (k < p.K) {
      picked[k] = score[id];
      p.ids[t * p.K + k] = padded ? -1 : id;
    }
  }
  __syncthreads();  // the picked scores are there
  if (e >= p.K) return;
  float sum = 0;
#pragma unroll 8
  for (int k = 0; k < p.K; ++k) sum += picked[k];
  const float weight = (p.normalize ? picked[e] / (sum + 1e-20f) : picked[e]) * p.scale;
  p.weights[t * p.K + e] = padded ? 0 : weight;
}

}  // namespace

void moe_route(const MoeRouteParams& p, Stream stream) {
  const unsigned threads = ceil_div(p.E, kWarp) * kWarp;
  dispatch(p.scoring == Scoring::softmax, [&](auto softmax) {
    dispatch(p.groups > 1, [&](auto groups) {
      const Grid grid{.blocks = p.T, .threads = threads, .early = true};
      launch(moe_route_kernel<softmax.value, groups.value>, grid, stream, p);
    });
  });
}

}  // namespace kdtree::cuda
