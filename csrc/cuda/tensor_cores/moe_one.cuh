// What the kernels of moe_experts for one row of few hidden features share: see
// moe_experts_int4.cu. Nothing is sorted; an expert that is named twice is multiplied by twice.
#pragma once

#include "moe_few.cuh"
#include "ring.cuh"

namespace kdtree::cuda {

constexpr int kOneExperts = 16;   // of the row, at most
constexpr int kOneInputs = 8192;  // D, at most
// Blocks of both kernels share a processor.
constexpr int kHiddenRegisters = 56, kDownRegisters = 72;

// The expert of pair k, or -1.
__device__ inline int one_expert(const MoeExpertsParams& p, int k) {
  const int e = p.ids[k];
  return e < p.E ? e : -1;
}

inline bool moe_one_fits(const MoeExpertsParams& p) {
  const auto from = reinterpret_cast<uintptr_t>(p.gate_up_scale) |
                    reinterpret_cast<uintptr_t>(p.down_scale) | reinterpret_cast<uintptr_t>(p.x);
  return p.T == 1 && p.K <= kOneExperts && p.D <= kOneInputs && moe_cluster(p) == 2 &&
         from % 16 == 0 && many_warps_fit();
}

void moe_hidden_one(const MoeExpertsParams& p, Stream stream);  // hidden
void moe_down_one(const MoeExpertsParams& p, Stream stream);    // y

}  // namespace kdtree::cuda
