// Routed experts, INT4 weights and bf16 rows, on tensor cores; few rows an expert.
//
//   h[t, k] = silu(gate[ids[t, k]] x[t]) * (up[ids[t, k]] x[t]), rounded to bf16
//   y[t] = sum over k in order of weights[t, k] * (down[ids[t, k]] h[t, k]), + shared[t]
//
// Grid    hidden_kernel and down_kernel: as many blocks as there are places, which share the items
//         (group of up to 8 rows of an expert, tile row of 32 outputs) evenly; each block sorts the
//         pairs (t, k) by expert for itself, or where they are many a kernel does so once.
//         down_kernel begins before hidden_kernel has ended: its first weights come while the last
//         of hidden's are multiplied. moe_weighted_sum.cu ends the op.
// Tiling  hidden: the inputs of a tile row of the gate, and of the same of up, are runs of equally many
//         tiles. A block's eight warps take four runs of each, a cluster of blocks the others.
//
//           block 0: gate  | warp 0 | warp 1 | warp 2 | warp 3 |    block 1: the runs 4 .. 7
//                    up    | warp 4 | warp 5 | warp 6 | warp 7 |
//
//         The runs' sums meet in shared memory, each block's share of the outputs in its own. down:
//         a warp multiplies a tile row alone, and no one waits for another.
// Smem    per warp a ring of kStages stages of weights (72 KB), the plan, the runs' sums: 96 KB.
// Reads   a touched expert's weights once per group of its rows (from HBM once), rows from L2.
// Floor   the touched experts' weights: 24.8 MB each for Kimi K2 (D = 7168, F = 2048), so 198 MB at
//         T = 1, K = 8, 44 us at 4.55 TB/s (an H200's read bandwidth). A tile's 1024 codes take about
//         75 instructions of a warp, two thirds of the time that its bytes take.
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
