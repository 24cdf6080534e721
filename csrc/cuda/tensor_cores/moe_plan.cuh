// Which rows moe_experts multiplies by which expert: the pairs (t, k) sorted by expert, an expert's
// pairs cut into groups. A row has the same bits in any group, so their order does not matter.
#pragma once

#include "../common.cuh"

namespace kdtree::cuda {

inline constexpr int kMoePairs = 512;     // pairs that every block sorts for itself
inline constexpr int kMoeFewPairs = 128;  // that it sorts by comparing all with all
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

// make_groups of at most kMoeFewPairs pairs: each is compared with all.
template <int kThreads>
__device__ int make_few_groups(const MoeExpertsParams& p, int rows, int* first, MoeGroup* group,
                               int* pair) {
  constexpr int kParts = kThreads / kMoeFewPairs;  // threads of a pair
  constexpr int kWords = kMoeFewPairs / kWarp;
  static_assert(kParts > 0 && kWarp % kParts == 0);
  const int thread = threadIdx.x, pairs = p.T * p.K, i = thread / kParts;
  int* key = first;  // expert * kMoeFewPairs + pair
  auto* begins = reinterpret_cast<unsigned*>(first + kMoeFewPairs);  // a bit a place in order
  if (thread < kMoeFewPairs) {
    const int e = thread < pairs ? p.ids[thread] : -1;
    key[thread] = (e >= 0 && e < p.E ? e : kMoeExperts) * kMoeFewPairs + thread;
  }
  if (thread < kWords) begins[thread] = 0;
  __syncthreads();
  const int own = key[i], expert = own / kMoeFewPairs, from = own - i, to = from + kMoeFewPairs;
  int place = 0, lower = 0, end = 0;  // pairs before it, before its expert's, before the next one's
  for (int c = thread % kParts; 4 * c < pairs && i < pairs; c += kParts) {
    const int4 v = reinterpret_cast<const int4*>(key)[c];
    place += (v.x < own) + (v.y < own) + (v.z < own) + (v.w < own);
    lower += (v.x < from) + (v.y < from) + (v.z < from) + (v.w < from);
    end += (v.x < to) + (v.y < to) + (v.z < to) + (v.w < to);
  }
#pragma unroll
  for (int d = 1; d < kParts; d *= 2) {
    place += __shfl_xor_sync(~0u, place, d);
    lower += __shfl_xor_sync(~0u, lower, d);
    end += __shfl_xor_sync(~0u, end, d);
  }
  const bool there = thread % kParts == 0 && i < pairs && expert < kMoeExperts;
  const bool begin = there && (place - lower) % rows == 0;  // of a group
  if (there) pair[place] = i;
  if (begin) atomicOr(&begins[place / kWarp], 1u << place % kWarp);
  __syncthreads();
  int groups = 0, before = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const unsigned bits = begins[w], lower_bits = (1u << place % kWarp) - 1;
    groups += __popc(bits);
    before += __popc(w < place / kWarp ? bits : w == place / kWarp ? bits & lower_bits : 0);
  }
  if (begin)
    group[before] = {place, static_cast<short>(expert), static_cast<short>(min(rows, end - place))};
  __syncthreads();
  return groups;
}

// Fills group and pair, of at most `rows` pairs a group, and returns the number of groups. By all
// kThreads of a block; first: kMoeExperts ints, on 16 bytes, and sums: a warp's each, both of shared
// memory. All blocks that do so for at most kMoePairs pairs agree.
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
  if (pairs <= kMoeFewPairs) return make_few_groups<kThreads>(p, rows, first, group, pair);
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
