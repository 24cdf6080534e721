// Best-first draft tree.
//
//   budget times: of all nodes' children that are not in the tree, take the best by score
//   descending, then depth, parent, candidate; score(child) = score(parent) + min(s, 0)
//
// Grid    one block a sequence. All its threads sort every candidate list, then one warp takes the
//         nodes one by one, then all write the tree.
// Tiling  Lane l of that warp keeps the best untaken child (the head) of nodes l and l + 32. A step
//         is a maximum over the heads' scores, a minimum over the tie-break of those that have it,
//         and two new heads, the taken one's successor and the new node's first. Successors are
//         read two steps ahead, so only the new node's list is waited for.
// Smem    the sorted lists, as (score, candidate) where that fits, else as candidates alone, whose
//         scores are read again from L1 or L2; and the candidates' tokens.
// Floor   launch and N - 1 dependent steps of two reductions and one shared read, about 130 cycles
//         each: 63 steps take 4.5 us at 1.8 GHz.
// Needs   N <= 64, M <= 64, J <= 15.
#include "common.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kSlots = kMaxNodes / kWarp;  // nodes a lane keeps
constexpr int kAhead = 3;                  // entries of a list that a head has read
constexpr int kPadding = -2;               // parent of a missing node
constexpr int kMaxSmem = 88 * 1024;        // the device's 99 KB less the static arrays

// An index of node or candidate takes 6 bits of a code, its lowest bit says "merged".
constexpr int kIndexMask = kMaxNodes - 1, kCandidateShift = 1, kParentShift = 7, kDepthShift = 13;

struct __align__(8) Entry {
  float score;
  int candidate;
};

// min(s, 0), and -inf for NaN: scores so clamped sort as the contract wants.
__device__ float clamped(float s) { return s > 0 ? 0.f : s == s ? s : -INFINITY; }

// A node's score, which is never above +0 nor -0, as an integer that grows with it. 0 is no score.
__device__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score);
  return score == -INFINITY ? 0 : bits >> 31 ? ~bits : bits | 1u << 31;
}
__device__ float score_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 1u << 31 : ~key);
}

// One sequence's candidate lists: list j, or where edges j * M + m, is sorted by clamped score
// descending, ties to the lower candidate.
template <bool kStaged>
struct Lists {
  const float* score;  // unsorted, in global memory
  void* sorted;        // in shared memory
  int M;
  bool edges;

  __device__ int begin(int depth, int candidate) const {
    return (edges ? depth * M + candidate : depth) * M;
  }

  __device__ Entry at(int i, int end) const {
    if (i >= end) return {-INFINITY, 0};
    if constexpr (kStaged) {
      return static_cast<const Entry*>(sorted)[i];
    } else {
      const int candidate = static_cast<const uint8_t*>(sorted)[i];
      return {clamped(score[end - M + candidate]), candidate};
    }
  }

  // Ranks every entry by counting those before it. At depth 0 of the edge form only list 0 is used.
  __device__ void sort(int J) const {
    const int entries = (edges ? J * M : J) * M;
    for (int i = threadIdx.x; i < entries; i += kThreads) {
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
      if constexpr (kStaged)
        static_cast<Entry*>(sorted)[list * M + rank] = {s, m};
      else
        static_cast<uint8_t*>(sorted)[list * M + rank] = static_cast<uint8_t>(m);
    }
  }
};

// The best untaken child of a node.
struct Head {
  uint32_t key;         // of the child's score; 0 where there is no child
  uint32_t code;        // depth | parent | candidate | merged: breaks ties and names the child
  float score;          // of the node
  int next, end;        // where the list goes on
  Entry first, second;  // its next two entries
};

// Makes entry the head. Distinct candidates' scores may round to one child score; then the list's
// order is not the contract's and the candidate is looked for when the child is taken: merged.
__device__ void place(Head& h, int depth, int node, Entry entry, float taken) {
  const float sum = h.score + entry.score;
  const bool merged = sum == taken || sum == h.score + h.first.score;
  h.key = key_of(sum);
  h.code =
      depth << kDepthShift | node << kParentShift | entry.candidate << kCandidateShift | merged;
}

// Of the children of a node that share the score sum, the one that comes after those taken: rank is
// the taken child's place in the list, which is right but for the order among these.
template <bool kStaged>
__device__ int merged_candidate(const Lists<kStaged>& lists, float score, float sum, int end,
                                int rank, int lane) {
  int first = kMaxNodes;
  uint32_t low = 0, high = 0;  // the set of their candidates
  for (int s = kSlots - 1; s >= 0; --s) {
    const int r = s * kWarp + lane;
    const Entry e = lists.at(end - lists.M + r, end);
    const bool shares = r < lists.M && score + e.score == sum;
    const unsigned found = __ballot_sync(~0u, shares);
    if (found) first = s * kWarp + __ffs(found) - 1;
    if (shares && e.candidate < kWarp) low |= 1u << e.candidate;
    if (shares && e.candidate >= kWarp) high |= 1u << (e.candidate - kWarp);
  }
  low = __reduce_or_sync(~0u, low);
  high = __reduce_or_sync(~0u, high);
  const int wanted = rank - first;
  const uint32_t below = (1u << lane) - 1;
  const bool in_low = low >> lane & 1 && __popc(low & below) == wanted;
  const bool in_high = high >> lane & 1 && __popc(low) + __popc(high & below) == wanted;
  const unsigned found = __ballot_sync(~0u, in_low);
  return found ? __ffs(found) - 1 : kWarp + __ffs(__ballot_sync(~0u, in_high)) - 1;
}

// Takes nodes until there are N or no child is left; returns how many there are. One warp calls it.
template <bool kStaged>
__device__ int grow(const TreeBuildParams& p, const Lists<kStaged>& lists, uint32_t* codes,
                    float* scores) {
  const int lane = threadIdx.x;
  Head heads[kSlots] = {};
  const auto open = [&](int n, int depth, int candidate, float score) {
    if (depth >= p.J) return;
    const int begin = lists.begin(depth, candidate), end = begin + p.M;
    Head h{.score = score, .next = begin + kAhead, .end = end};
    const Entry entry = lists.at(begin, end);
    h.first = lists.at(begin + 1, end);
    h.second = lists.at(begin + 2, end);
    place(h, depth + 1, n, entry, 1.f);  // no score is 1: nothing was taken
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      if (n == s * kWarp + lane) heads[s] = h;
  };
  open(0, 0, 0, 0.f);

  int count = 1;
  bool chain = p.chain_seed;
  for (; count < p.N; ++count) {
    uint32_t key = 0, code = 0;
    if (chain) {  // the newest node's best child; a chain is no longer than a slot is wide
      key = __shfl_sync(~0u, heads[0].key, count - 1);
      code = __shfl_sync(~0u, heads[0].code, count - 1);
      chain = key != 0;
    }
    if (!chain) {
      uint32_t mine = ~0u;
      key = __reduce_max_sync(~0u, max(heads[0].key, heads[1].key));
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
        if (heads[s].key == key) mine = min(mine, heads[s].code);
      code = __reduce_min_sync(~0u, mine);
    }
    if (key == 0) break;

    const float score = score_of(key);
    const int depth = code >> kDepthShift, parent = code >> kParentShift & kIndexMask;
    int candidate = code >> kCandidateShift & kIndexMask;
    const bool upper = parent >= kWarp;
    Head h = upper ? heads[1] : heads[0];  // the parent's, in the lane that keeps it
    if (code & 1) {
      const int end = __shfl_sync(~0u, h.end, parent % kWarp);
      const int rank = __shfl_sync(~0u, h.next, parent % kWarp) - kAhead - (end - p.M);
      const float above = __shfl_sync(~0u, h.score, parent % kWarp);
      candidate = merged_candidate(lists, above, score, end, rank, lane);
    }
    if (lane == 0) {
      codes[count] = depth << kDepthShift | parent << kParentShift | candidate << kCandidateShift;
      scores[count] = score;
    }
    const Entry entry = h.first;
    h.first = h.second;
    h.second = lists.at(h.next++, h.end);
    place(h, depth, parent, entry, score);
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      if (parent == s * kWarp + lane) heads[s] = h;
    open(count, depth, candidate, score);
  }
  return count;
}

template <bool kStaged>
__global__ void __launch_bounds__(kThreads)
    tree_build_kernel(const __grid_constant__ TreeBuildParams p) {
  extern __shared__ __align__(16) char smem[];
  __shared__ int64_t tokens[kMaxDepth * kMaxNodes];
  __shared__ uint32_t codes[kMaxNodes];
  __shared__ float scores[kMaxNodes];
  __shared__ int nodes;
  const int64_t b = blockIdx.x;
  const int64_t lists_size = int64_t{p.edges ? p.J * p.M : p.J} * p.M;
  const Lists<kStaged> lists{p.score + b * lists_size, smem, p.M, p.edges};

  const int64_t* candidates = p.candidate + b * p.J * p.M;
  for (int i = threadIdx.x; i < p.J * p.M; i += kThreads) tokens[i] = candidates[i];
  const int64_t root = p.root[b];
  lists.sort(p.J);
  __syncthreads();
  if (threadIdx.x < kWarp) {
    const int count = grow(p, lists, codes, scores);
    if (threadIdx.x == 0) nodes = count;
  }
  __syncthreads();

  const int n = threadIdx.x;
  if (n >= p.N) return;
  const int64_t out = b * p.N + n;
  int64_t token = 0, ancestors = 0;
  int parent = kPadding, depth = 0;
  float score = -INFINITY;
  if (n == 0) {
    token = root, ancestors = 1, parent = -1, score = 0;
  } else if (n < nodes) {
    const int candidate = codes[n] >> kCandidateShift & kIndexMask;
    depth = codes[n] >> kDepthShift;
    parent = codes[n] >> kParentShift & kIndexMask;
    score = scores[n];
    token = tokens[(depth - 1) * p.M + candidate];
    ancestors = 1;  // the root
    for (int a = n; a > 0; a = codes[a] >> kParentShift & kIndexMask) ancestors |= int64_t{1} << a;
  }
  p.token[out] = token;
  p.parent[out] = parent;
  p.depth[out] = depth;
  p.ancestors[out] = ancestors;
  p.node_score[out] = score;
}

}  // namespace

void tree_build(const TreeBuildParams& p, Stream stream) {
  const int entries = (p.edges ? p.J * p.M : p.J) * p.M;
  const int staged = entries * static_cast<int>(sizeof(Entry));
  if (staged <= kMaxSmem)
    launch(tree_build_kernel<true>, {p.B, kThreads, staged}, stream, p);
  else
    launch(tree_build_kernel<false>, {p.B, kThreads, entries}, stream, p);
}

}  // namespace kdtree::cuda
