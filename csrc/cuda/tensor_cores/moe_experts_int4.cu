// Routed experts, INT4 weights and bf16 rows, on tensor cores.
//
//   h[t, k] = silu(gate[ids[t, k]] x[t]) * (up[ids[t, k]] x[t]), rounded to bf16
//   y[t] = sum over k in order of weights[t, k] * (down[ids[t, k]] h[t, k]), + shared[t]
//
// Grid    few rows an expert: moe_few_hidden.cu and moe_few_down.cu; many: moe_experts_many.cu,
//         or on sm_90a moe_experts_sm90.cu.
//         Then weighted_sum_kernel, a thread per two elements of y. One row, F at most 512, on an
//         H200: moe_one_hidden.cu and moe_one_down.cu, which adds up. Each kernel of few
//         rows begins before the one before has ended. Every block sorts the pairs (t, k) by expert
//         for itself, or where they are many a kernel does so once.
// Reads   of the sum: 4 T K D bytes, from L2 where T is small; 15 MB at T = 64 of Kimi K2.
// Floor   the touched experts' weights: 24.8 MB each for Kimi K2 (D = 7168, F = 2048), so 198 MB at
//         T = 1, K = 8, 44 us at 4.55 TB/s (an H200's read bandwidth).
// Needs   packed weights on 16 bytes; rows and scales may start anywhere; sm_90 or later.
#include "barrier.cuh"
#include "device.cuh"
#include "moe_experts_int4.cuh"
#include "moe_few.cuh"
#include "moe_one.cuh"

namespace kdtree::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kSumThreads = 128;

// y[t] = sum over k in order of weights[t, k] * partial[t, k], + shared[t]; no id < 0.
__global__ void __launch_bounds__(kSumThreads)
    weighted_sum_kernel(const __grid_constant__ MoeExpertsParams p) {
  constexpr int kEach = 8;  // experts whose results are on their way at once
  const int64_t at = 2 * (int64_t{blockIdx.x} * kSumThreads + threadIdx.x);
  let_next_begin();
  const int64_t t = at / p.D, d = at % p.D;
  if (t >= p.T) return wait_for_previous();
  float2 sum = {0, 0}, shared = {0, 0};
  if (p.shared) {
    const auto* from = static_cast<const bf16*>(p.shared) + at;
    shared = {float(from[0]), float(from[1])};
  }
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
  if (p.shared) sum.x += shared.x, sum.y += shared.y;
  *reinterpret_cast<__nv_bfloat162*>(static_cast<bf16*>(p.y) + at) = {bf16(sum.x), bf16(sum.y)};
}

}  // namespace

void moe_weighted_sum(const MoeExpertsParams& p, Stream stream) {
  const int64_t threads = int64_t{p.T} * p.D / 2;
  const auto blocks = static_cast<unsigned>((threads - 1) / kSumThreads + 1);
  launch(weighted_sum_kernel, {.blocks = blocks, .threads = kSumThreads, .early = true}, stream, p);
}

void moe_experts_int4(const MoeExpertsParams& p, Stream stream) {
  if (moe_many_fits(p)) {
    if (!device_has_wgmma() || !moe_products_sm90(p, stream)) moe_products_many(p, stream);
  } else if (moe_one_fits(p)) {
    moe_hidden_one(p, stream);
    return moe_down_one(p, stream);
  } else {
    if (!moe_sorts_itself(p)) moe_make_plan(p, stream);
    moe_hidden_few(p, stream);
    moe_down_few(p, stream);
  }
  moe_weighted_sum(p, stream);
}

}  // namespace kdtree::cuda
