// The candidate lists of a draft tree, sorted.
#pragma once
#include "common.cuh"

namespace kdtree::cuda {

// min(s, 0), and -inf for NaN: scores so clamped sort as the contract wants.
__device__ inline float clamped(float s) { return s > 0 ? 0.f : s == s ? s : -INFINITY; }

// Scores are never above +0 nor -0, so the better one has the smaller bits; these say "no child".
constexpr uint32_t kNone = 0xff800000;  // -inf; a head that was never set is above it

struct __align__(8) Entry {
  float score;
  int down;  // where the list of its children begins
};

// One sequence's candidate lists: list j, or where edges j * M + m, is sorted by clamped score
// descending, ties to the lower candidate. Two entries without a score end each and lead to a list
// of such: a head that has run through its list is never taken, whatever lies behind.
template <bool kStaged>
struct Lists {
  const float* score;  // unsorted, in global memory
  Entry* entries;      // in shared memory, where staged
  uint8_t* candidates;
  int J, M, edges;

  __host__ __device__ static int stride(int M) { return M + 2 + M % 2; }
  __host__ __device__ static int count(int J, int M, bool edges) { return edges ? J * M : J; }
  __host__ __device__ static int size(int J, int M, bool edges) {
    return (count(J, M, edges) + 1) * stride(M) + 2;
  }

  // Where the children of a candidate of a depth begin.
  __device__ int below(int depth, int candidate) const {
    const int list = edges ? (depth + 1) * M + candidate : depth + 1;
    return (depth + 1 < J ? list : count(J, M, edges)) * stride(M);
  }

  __device__ Entry operator[](int at) const {
    if constexpr (kStaged) {
      return entries[at];
    } else {
      const int candidate = candidates[at], list = at / stride(M);
      if (candidate >= M) return {-INFINITY, below(J, 0)};
      return {clamped(score[list * M + candidate]), below(edges ? list / M : list, candidate)};
    }
  }

  __device__ void set(int at, float s, int candidate, int down) const {
    candidates[at] = static_cast<uint8_t>(candidate);
    if constexpr (kStaged) entries[at] = {s, down};
  }

  // Ranks every entry by counting those before it. At depth 0 of the edge form only list 0 is used.
  __device__ void sort() const {
    const int lists = count(J, M, edges);
    for (int i = threadIdx.x; i < lists * M; i += blockDim.x) {
      const int list = i / M, m = i - list * M;
      if (edges && list > 0 && list < M) continue;
      const float* others = score + list * M;
      const float s = clamped(others[m]);
      int rank = 0;
#pragma unroll 8
      for (int k = 0; k < M; ++k) {
        const float other = clamped(others[k]);
        rank += other > s || (other == s && k < m);
      }
      set(list * stride(M) + rank, s, m, below(edges ? list / M : list, m));
      for (int k = M; k < stride(M) && m == 0; ++k)
        set(list * stride(M) + k, -INFINITY, kMaxNodes, below(J, 0));
    }
    for (int i = threadIdx.x; i < stride(M) + 2; i += blockDim.x)
      set(lists * stride(M) + i, -INFINITY, kMaxNodes, below(J, 0));
  }
};

}  // namespace kdtree::cuda
