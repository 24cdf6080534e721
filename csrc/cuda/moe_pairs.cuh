// How the blocks of moe_experts share the pairs (t, k): a block multiplies by one expert, and finds
// the rows of that expert among the ids by itself, without a sort and without the host.
#pragma once

#include "common.cuh"

namespace kdtree::cuda {

inline constexpr int kMoeRows = 4;    // rows of a group: a row has the same bits in any group
inline constexpr int kMoeIds = 2048;  // ids that a block looks through at a time

template <int kThreads>
struct MoePairs {
  int pair[kMoeIds];  // t * K + k, ascending
  int hits[kThreads / kWarp];
};

// Slots that an expert can have: one a pair, or one an expert where there are more pairs.
__host__ __device__ inline int moe_slots(const MoeExpertsParams& p) {
  return p.T * p.K < p.E ? p.T * p.K : p.E;
}

// The expert of a slot, the same for every thread of the block, or -1: a pair's expert, unless an
// earlier pair has it, too.
__device__ inline int moe_expert(const MoeExpertsParams& p, int slot) {
  if (moe_slots(p) == p.E) return slot;
  const int expert = p.ids[slot];
  if (expert < 0 || expert >= p.E) return -1;
  int earlier = 0;
  for (int i = threadIdx.x; i < slot; i += blockDim.x) earlier |= p.ids[i] == expert;
  return __syncthreads_or(earlier) ? -1 : expert;
}

// Puts the pairs of expert among the kMoeIds ids from `begin` on into found, and returns how many.
template <int kThreads>
__device__ int find_pairs(const MoeExpertsParams& p, int expert, int begin,
                          MoePairs<kThreads>& found) {
  constexpr int kSteps = kMoeIds / kThreads;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int first = begin + warp * kSteps * kWarp + lane, end = p.T * p.K;
  unsigned hit[kSteps];
  int count = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int i = first + s * kWarp;
    hit[s] = __ballot_sync(~0u, i < end && p.ids[i] == expert);
    count += __popc(hit[s]);
  }
  __syncthreads();  // the pairs of the round before have been used
  if (lane == 0) found.hits[warp] = count;
  __syncthreads();
  int at = 0, total = 0;
  for (int w = 0; w < kThreads / kWarp; ++w) {
    at += w < warp ? found.hits[w] : 0;
    total += found.hits[w];
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const unsigned before = hit[s] & ((1u << lane) - 1);
    if (hit[s] >> lane & 1) found.pair[at + __popc(before)] = first + s * kWarp;
    at += __popc(hit[s]);
  }
  __syncthreads();
  return total;
}

// Calls f<R>(pairs, count) for every group of expert's pairs, R = 1 or kMoeRows. All threads of the
// block take part. More variants of R spill: each keeps its addresses in registers.
template <int kThreads, class F>
__device__ void for_groups(const MoeExpertsParams& p, int expert, MoePairs<kThreads>& found,
                           F&& f) {
  for (int begin = 0; begin < p.T * p.K; begin += kMoeIds) {
    const int total = find_pairs(p, expert, begin, found);
    for (int i = 0; i < total; i += kMoeRows) {
      const int count = min(kMoeRows, total - i);
      if (count == 1)
        f.template operator()<1>(found.pair + i, count);
      else
        f.template operator()<kMoeRows>(found.pair + i, count);
    }
  }
}

}  // namespace kdtree::cuda
