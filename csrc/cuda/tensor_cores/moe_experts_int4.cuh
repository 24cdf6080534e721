// moe_experts of bf16 rows and INT4 weights, in forms for few and for many rows an expert.
//
// The order of every sum is a function of D and F alone. A hidden output's inputs are cut into
// moe_hidden_runs runs of equally many tiles (but for the last), each of which is a chain in order of
// tiles; the runs are added in order, from zero on. A down output's inputs are one chain.
#pragma once

#include "../mma.cuh"

namespace kdtree::cuda {

inline constexpr int kMoeRuns = 4;  // a block

// Blocks that share the inputs of a hidden output: few outputs an expert would leave GPUs idle.
__host__ __device__ inline int moe_cluster(const MoeExpertsParams& p) { return p.F <= 512 ? 2 : 1; }
__host__ __device__ inline int moe_hidden_runs(const MoeExpertsParams& p) {
  return kMoeRuns * moe_cluster(p);
}

inline int moe_processors() {
  int device, count;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// A feature of hidden, of its sums over kInt4Unit.
__device__ inline __nv_bfloat16 gated(float gate, float up) {
  gate *= kInt4Unit, up *= kInt4Unit;
  return __nv_bfloat16(gate / (1 + expf(-gate)) * up);
}

void moe_experts_int4(const MoeExpertsParams& p, Stream stream);

// Sorts many pairs into groups of up to `rows` rows, once for all blocks.
void moe_make_plan(const MoeExpertsParams& p, Stream stream, int rows = 8);

// Whether the experts have so many rows, on average, that the form for many is the faster; its rows
// stand on 16 bytes.
bool moe_many_fits(const MoeExpertsParams& p);
// hidden and partial by that form: by mma.sync, or where device_has_wgmma() by wgmma.
void moe_products_many(const MoeExpertsParams& p, Stream stream);
// False, and nothing done, where scales do not stand on 16 bytes.
bool moe_products_sm90(const MoeExpertsParams& p, Stream stream);

// y from partial.
void moe_weighted_sum(const MoeExpertsParams& p, Stream stream);

}  // namespace kdtree::cuda
