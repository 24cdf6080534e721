// What the kernels of moe_experts for few rows an expert share: see moe_experts_int4.cu.
#pragma once

#include <cstdlib>

#include "int4_stream.cuh"
#include "moe_experts_int4.cuh"
#include "moe_plan.cuh"
#include "moe_queue.cuh"

namespace kdtree::cuda {

constexpr int kFewWarps = 8;    // of a block: two fit a processor
constexpr int kManyWarps = 16;  // one fits

template <int kWarps, int kTeams, int S, int K, int N>
struct CommonSmem {
  Int4Stage<S, K> stage[kWarps][N];
  MoeGroup group[kMoePairs];
  int pair[kMoePairs];
  int2 plan[kWarps];
  alignas(16) int first[kMoeExperts];
  MoePlan work;
  MoeQueue<kTeams> queue;
};

template <class T>
__device__ inline T& shared_memory() {
  extern __shared__ __align__(128) char bytes[];
  return *reinterpret_cast<T*>(bytes);
}

// The plan stays in shared memory: registers are short.
template <int kThreads, class Smem>
__device__ const MoePlan& plan(const MoeExpertsParams& p, Smem& smem) {
  smem.queue.open();
  MoePlan work = {smem.group, smem.pair, 0};
  if (moe_sorts_itself(p))
    work.groups = make_groups<kThreads>(p, kRows, smem.first, smem.plan, smem.group, smem.pair);
  else
    work = made_plan(p);
  if (threadIdx.x == 0) smem.work = work;
  __syncthreads();
  return smem.work;
}

// The pair of this lane's B fragments among a group's; beyond the last, the last: it is not stored.
__device__ inline int lane_pair(const MoePlan& work, const MoeGroup& group) {
  return work.pair[group.first + min(int(threadIdx.x) % kWarp / 4, group.count - 1)];
}

// The most shared memory that a kernel may have: of an H200's alone where it wants more than all
// have.
template <class Smem>
constexpr int kLimit = sizeof(Smem) > kSmemEverywhere ? kSmemSm90 : kSmemEverywhere;

// Whether a block may have the shared memory of sixteen warps: the two blocks of eight that fit a
// processor otherwise do not end together. KDTREE_MMA_SYNC=1: no, as on other cards.
inline bool many_warps_fit() {
  static const char* forced = std::getenv("KDTREE_MMA_SYNC");
  if (forced && forced[0] == '1') return false;
  int device, most;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return most >= kSmemSm90;
}

// hidden and partial, by these kernels.
void moe_hidden_few(const MoeExpertsParams& p, Stream stream);
void moe_down_few(const MoeExpertsParams& p, Stream stream);

}  // namespace kdtree::cuda
