// Which rows moe_experts multiplies by which expert: the pairs (t, k) sorted by expert, an expert's
// pairs cut into groups. A row has the same bits in any group, so their order does not matter.
#pragma once

#include "../common.cuh"

namespace kdtree::cuda {

inline constexpr int kMoePairs = 512;     // pairs that every block sorts for itself
inline constexpr int kMoeExperts = 1024;  // the most experts there are

struct MoeGroup {
  int first;  // of its pairs
  short expert, count;
};

struct MoePlan {
  const MoeGroup* group;
  const int* pair;  // t * K + k
  int groups;
};

__host__ __device__ inline bool moe_sorts_itself(const MoeExpertsParams& p) {
  return p.T * p.K <= kMoePairs;
}

// The same of at most a warp's pairs, by the first warp.
__device__ inline int make_few_groups(const MoeExpertsParams& p, int rows, MoeGroup* group,
                                      int* pair) {
  const int i = threadIdx.x, id = i < p.T * p.K ? p.ids[i] : -1;
  const unsigned same = __match_any_sync(~0u, id), before = same & ((1u << i) - 1);
  const int at = __popc(before) % rows, there = id >= 0 && id < p.E;
  const unsigned firsts = __ballot_sync(~0u, there && at == 0);
  if (there) {
    const unsigned up_to =
        before | 1u << i;  // its group's first is the last of the firsts of these
    const int first = kWarp - 1 - __clz(firsts & up_to),
              place = __popc(firsts & ((1u << first) - 1));
    pair[place * rows + at] = i;
    if (at == 0)
      group[place] = {place * rows, static_cast<short>(id),
                      static_cast<short>(min(rows, __popc(same) - __popc(before)))};
  }
  return __popc(firsts);
}

// Fills group and pair, of at most `rows` pairs a group, and returns the number of groups. By all
// kThreads of a block; first: kMoeExperts ints and sums: a warp's each, both of shared memory. All
// blocks that do so for at most kMoePairs pairs agree.
template <int kThreads>
__device__ int make_groups(const MoeExpertsParams& p, int rows, int* first, int2* sums,
                           MoeGroup* group, int* pair) {
  constexpr int kEach = kMoeExperts / kThreads, kWarps = kThreads / kWarp;
  constexpr int kOwn = ceil_div(kMoePairs, kThreads);  // pairs of a thread, where they are few
  const int pairs = p.T * p.K, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto expert_of = [&](int i) {
    const int e = i < pairs ? p.ids[i] : -1;
    return e < p.E ? e : -1;
  };
  if (pairs <= kWarp) {
    if (warp == 0) {
      const int groups = make_few_groups(p, rows, group, pair);
      if (lane == 0) sums[0].x = groups;
    }
    __syncthreads();
    return sums[0].x;
  }
#pragma unroll 1
  for (int e = threadIdx.x; e < kMoeExperts; e += kThreads) first[e] = 0;
  int own[kOwn];
#pragma unroll
  for (int n = 0; n < kOwn; ++n) own[n] = expert_of(n * kThreads + threadIdx.x);
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kOwn; ++n)
    if (own[n] >= 0) atomicAdd(&first[own[n]], 1);
#pragma unroll 1
  for (int i = kOwn * kThreads + threadIdx.x; i < pairs; i += kThreads)
    if (const int e = expert_of(i); e >= 0) atomicAdd(&first[e], 1);
  __syncthreads();

  int count[kEach], at = 0, next = 0;  // this thread's experts' pairs; pairs and groups before them
  for (int i = 0; i < kEach; ++i) {
    count[i] = first[threadIdx.x * kEach + i];
    at += count[i];
    next += (count[i] + rows - 1) / rows;
  }
  const int own_at = at, own_next = next;
  for (int d = 1; d < kWarp; d *= 2) {
    const int a = __shfl_up_sync(~0u, at, d), b = __shfl_up_sync(~0u, next, d);
    if (lane >= d) at += a, next += b;
  }
  if (lane == kWarp - 1) sums[warp] = {at, next};
  at -= own_at, next -= own_next;
  __syncthreads();
  int groups = 0;
#pragma unroll 1
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) at += sums[w].x, next += sums[w].y;
    groups += sums[w].y;
  }
  for (int i = 0; i < kEach; ++i) {
    const int e = threadIdx.x * kEach + i;
#pragma unroll 1
    for (int begin = 0; begin < count[i]; begin += rows)
      group[next++] = {at + begin, static_cast<short>(e),
                       static_cast<short>(min(rows, count[i] - begin))};
    first[e] = at;
    at += count[i];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kOwn; ++n)
    if (own[n] >= 0) pair[atomicAdd(&first[own[n]], 1)] = n * kThreads + threadIdx.x;
#pragma unroll 1
  for (int i = kOwn * kThreads + threadIdx.x; i < pairs; i += kThreads)
    if (const int e = expert_of(i); e >= 0) pair[atomicAdd(&first[e], 1)] = i;
  __syncthreads();
  if (pairs > kMoePairs) return groups;

  int rank[kOwn];  // each expert's pairs in order
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    if (own[n] < 0) continue;
    const int begin = own[n] ? first[own[n] - 1] : 0, end = first[own[n]];
    rank[n] = begin;
#pragma unroll 1
    for (int j = begin; j < end; ++j) rank[n] += pair[j] < n * kThreads + int(threadIdx.x);
  }
  __syncthreads();  // all have looked
#pragma unroll
  for (int n = 0; n < kOwn; ++n)
    if (own[n] >= 0) pair[rank[n]] = n * kThreads + threadIdx.x;
  __syncthreads();
  return groups;
}

// A plan in p.work, made once by a block of kThreads for all that follow.
template <int kThreads>
__device__ void make_plan(const MoeExpertsParams& p, int rows, int* first, int2* sums) {
  auto* group = reinterpret_cast<MoeGroup*>(p.work + 2);
  int* pair = p.work + 2 + 2 * p.T * p.K;
  const int groups = make_groups<kThreads>(p, rows, first, sums, group, pair);
  if (threadIdx.x == 0) p.work[0] = groups;
}
__device__ inline MoePlan made_plan(const MoeExpertsParams& p) {
  return {reinterpret_cast<const MoeGroup*>(p.work + 2), p.work + 2 + 2 * p.T * p.K, p.work[0]};
}

}  // namespace kdtree::cuda
