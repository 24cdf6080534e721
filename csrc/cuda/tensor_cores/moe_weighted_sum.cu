// The end of moe_experts of INT4 weights and bf16 rows.
//
//   y[t] = sum over k in order of weights[t, k] * partial[t, k], + shared[t]; no id < 0
//
// Grid    a thread per two elements of y. It begins before the kernel before has ended.
// Reads   partial once, from L2 where T is small.
// Floor   4 T K D bytes: 15 MB at T = 64 of Kimi K2, 3 us at 4.55 TB/s, and a launch.
#include "async.cuh"
#include "moe_experts_int4.cuh"

namespace kdtree::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kSumThreads = 128;

__global__ void __launch_bounds__(kSumThreads)
    weighted_sum_kernel(const __grid_constant__ MoeExpertsParams p) {
  constexpr int kEach = 8;  // experts whose results are on their way at once
  const int64_t at = 2 * (int64_t{blockIdx.x} * kSumThreads + threadIdx.x);
  const int64_t t = at / p.D, d = at % p.D;
  if (t >= p.T) return wait_for_previous();
  float2 sum = {0, 0};
  for (int k0 = 0; k0 < p.K; k0 += kEach) {
    float weight[kEach];
    bool there[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int64_t i = t * p.K + min(k0 + k, p.K - 1);
      there[k] = k0 + k < p.K && p.ids[i] >= 0 && p.ids[i] < p.E;
      weight[k] = p.weights[i];
    }
    if (k0 == 0) wait_for_previous();
    float2 v[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      if (there[k])
        v[k] = __ldcg(reinterpret_cast<const float2*>(p.partial + (t * p.K + k0 + k) * p.D + d));
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      if (there[k]) sum = {fmaf(weight[k], v[k].x, sum.x), fmaf(weight[k], v[k].y, sum.y)};
  }
  if (p.shared) {
    const auto* shared = static_cast<const bf16*>(p.shared) + at;
    sum.x += float(shared[0]), sum.y += float(shared[1]);
  }
  *reinterpret_cast<__nv_bfloat162*>(static_cast<bf16*>(p.y) + at) = {bf16(sum.x), bf16(sum.y)};
}

}  // namespace

void moe_weighted_sum(const MoeExpertsParams& p, Stream stream) {
  const int64_t threads = int64_t{p.T} * p.D / 2;
  const auto blocks = static_cast<unsigned>((threads - 1) / kSumThreads + 1);
  launch(weighted_sum_kernel, {blocks, kSumThreads, {}, 1, true}, stream, p);
}

}  // namespace kdtree::cuda
