// Routed experts, INT4 weights and bf16 rows, on tensor cores.
//
//   h[t, k] = silu(gate[ids[t, k]] x[t]) * (up[ids[t, k]] x[t]), rounded to bf16
//   y[t] = sum over k in order of weights[t, k] * (down[ids[t, k]] h[t, k]), + shared[t]
//
// Grid    few rows an expert: moe_few_hidden.cu and moe_few_down.cu; many: moe_experts_many.cu.
//         Then moe_weighted_sum.cu. Each kernel but the first begins before the one before has
//         ended. Every block sorts the pairs (t, k) by expert for itself, or where they are many a
//         kernel does so once.
// Floor   the touched experts' weights: 24.8 MB each for Kimi K2 (D = 7168, F = 2048), so 198 MB at
//         T = 1, K = 8, 44 us at 4.55 TB/s (an H200's read bandwidth).
// Needs   packed weights on 16 bytes; rows and scales may start anywhere; sm_90 or later.
#include "moe_experts_int4.cuh"
#include "moe_few.cuh"

namespace kdtree::cuda {

void moe_experts_int4(const MoeExpertsParams& p, Stream stream) {
  if (moe_many_fits(p)) {
    moe_products_many(p, stream);
  } else {
    if (!moe_sorts_itself(p)) moe_make_plan(p, stream);
    moe_hidden_few(p, stream);
    moe_down_few(p, stream);
  }
  moe_weighted_sum(p, stream);
}

}  // namespace kdtree::cuda
