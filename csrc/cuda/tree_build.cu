// Best-first draft tree.
//
//   budget times: of all nodes' children that are not in the tree, take the best by score
//   descending, then depth, parent, candidate; score(child) = score(parent) + min(s, 0)
//
// Grid    one block a sequence. All its threads sort every candidate list, then one warp takes the
//         nodes one by one, then all write the tree.
// Tiling  Lane l of that warp keeps the best untaken child (the head) of nodes l and l + 32 as two
//         words. A step is a minimum over the heads' scores, as bits, and one over the tie-break of
//         those that have it; then all lanes work out the two new heads, the taken one's successor
//         and the new node's first, from what shared memory knows of the two nodes.
// Smem    the sorted lists, as (score, candidate) where that fits, else as candidates alone, whose
//         scores are read again from L1 or L2; and the candidates' tokens.
// Floor   launch and N - 1 dependent steps of two reductions and one shared read: about 150 cycles
//         each by their latencies, 5 us for 63 steps at 1.98 GHz. Measured are 370 cycles, 12 us.
// Needs   N <= 64, M <= 64, J <= 15.
#include "common.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kSlots = kMaxNodes / kWarp;  // nodes a lane keeps
constexpr int kAhead = 3;                  // entries of a list that a new node has read
constexpr int kPadding = -2;               // parent of a missing node
constexpr int kMaxSmem = 88 * 1024;        // the device's 99 KB less the static arrays

// An index of node or candidate takes 6 bits of a code, its lowest bit says "merged". A node's rest
// has two candidates in 7 bits each: what ends a list is candidate 64, more may lie behind it.
constexpr int kIndexMask = kMaxNodes - 1, kCandidateShift = 1, kParentShift = 7, kDepthShift = 13;
constexpr int kRestShift = 7, kRestMask = 127;

struct __align__(8) Entry {
  float score;
  int candidate;
};

// min(s, 0), and -inf for NaN: scores so clamped sort as the contract wants.
__device__ float clamped(float s) { return s > 0 ? 0.f : s == s ? s : -INFINITY; }

// Scores are never above +0 nor -0, so the better one has the smaller bits; these say "no child".
constexpr uint32_t kNone = 0xff800000;  // -inf; a head that was never set is above it

// One sequence's candidate lists: list j, or where edges j * M + m, is sorted by clamped score
// descending, ties to the lower candidate. An entry without a score ends each, so that a head which
// has run through its list never wins, whatever lies behind.
template <bool kStaged>
struct Lists {
  const float* score;  // unsorted, in global memory
  void* sorted;        // in shared memory
  int M;
  bool edges;

  __device__ int begin(int depth, int candidate) const {
    return (edges ? depth * M + candidate : depth) * (M + 1);
  }

  __device__ Entry at(int i) const {
    if constexpr (kStaged) {
      return static_cast<const Entry*>(sorted)[i];
    } else {
      const int candidate = static_cast<const uint8_t*>(sorted)[i];
      if (candidate >= M) return {-INFINITY, 0};
      return {clamped(score[i / (M + 1) * M + candidate]), candidate};
    }
  }

  __device__ void set(int i, Entry e) const {
    if constexpr (kStaged)
      static_cast<Entry*>(sorted)[i] = e;
    else
      static_cast<uint8_t*>(sorted)[i] = static_cast<uint8_t>(e.candidate);
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
      set(list * (M + 1) + rank, {s, m});
      if (m == 0) set(list * (M + 1) + M, {-INFINITY, kMaxNodes});
    }
    const int behind = (edges ? J * M : J) * (M + 1);
    if (threadIdx.x < kAhead) set(behind + threadIdx.x, {-INFINITY, kMaxNodes});
  }
};

// A node, and what follows its head in its list.
struct __align__(16) Node {
  float score, next, later;
  int rest;  // candidates of the two, and where the list goes on after them
};

// Distinct candidates' scores may round to one child score; then the list's order is not the
// contract's and the candidate is looked for when the child is taken: merged.
__device__ uint32_t code_of(int depth, int parent, int candidate, bool merged) {
  return depth << kDepthShift | parent << kParentShift | candidate << kCandidateShift | merged;
}

__device__ int rest_of(int next, int later, int at) {
  return (next & kRestMask) | (later & kRestMask) << kRestShift | at << 2 * kRestShift;
}

// Of the children of a node that share the score sum, the one that comes after those taken: rank is
// the taken child's place in the list, which is right but for the order among these.
template <bool kStaged>
__device__ int merged_candidate(const Lists<kStaged>& lists, float score, float sum, int begin,
                                int rank, int lane) {
  int first = kMaxNodes;
  uint32_t low = 0, high = 0;  // the set of their candidates
  for (int s = kSlots - 1; s >= 0; --s) {
    const int r = s * kWarp + lane;
    const Entry e = lists.at(begin + min(r, lists.M));
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
__device__ int grow(const TreeBuildParams& p, const Lists<kStaged>& lists, Node* nodes,
                    uint32_t* codes) {
  if (p.J == 0 || p.M == 0) return 1;
  const int lane = threadIdx.x;
  uint32_t keys[kSlots] = {~0u, ~0u}, names[kSlots] = {~0u, ~0u};  // heads: bits of score, code
  const auto put = [&](int n, uint32_t key, uint32_t name) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      if (n == s * kWarp + lane) keys[s] = key, names[s] = name;
  };
  const auto open = [&](int n, int depth, int candidate, float score) {
    const int begin = lists.begin(min(depth, p.J - 1), candidate);
    const Entry first = lists.at(begin), next = lists.at(begin + 1), later = lists.at(begin + 2);
    const float sum = depth < p.J ? score + first.score : -INFINITY;
    put(n, __float_as_uint(sum), code_of(depth + 1, n, first.candidate, sum == score + next.score));
    nodes[n] = {score, next.score, later.score,
                rest_of(next.candidate, later.candidate, begin + kAhead)};
  };
  open(0, 0, 0, 0.f);

  int count = 1, before = 0;
  Node moved = nodes[0];  // of `before`, not yet stored: its last load is waited for here
  bool chain = p.chain_seed;
  for (; count < p.N; ++count) {
    uint32_t key = __reduce_min_sync(~0u, min(keys[0], keys[1])), code = ~0u;
    nodes[before] = moved;
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      if (keys[s] == key) code = min(code, names[s]);
    code = __reduce_min_sync(~0u, code);
    if (chain) {  // the newest node's best child; a chain is no longer than a slot is wide
      const uint32_t best = __shfl_sync(~0u, keys[0], count - 1);
      const uint32_t name = __shfl_sync(~0u, names[0], count - 1);
      chain = best < kNone;
      if (chain) key = best, code = name;
    }
    if (key >= kNone) break;

    const float score = __uint_as_float(key);
    const int depth = code >> kDepthShift, parent = code >> kParentShift & kIndexMask;
    int candidate = code >> kCandidateShift & kIndexMask;
    const Node node = nodes[parent];
    const int at = node.rest >> 2 * kRestShift;
    if (code & 1) {
      const int begin = lists.begin(depth - 1, codes[parent] >> kCandidateShift & kIndexMask);
      const int rank = at - kAhead - begin;
      candidate = merged_candidate(lists, node.score, score, begin, rank, lane);
    }
    codes[count] = code_of(depth, parent, candidate, false);

    const float sum = node.score + node.next;
    const bool merged = sum == score || sum == node.score + node.later;
    put(parent, __float_as_uint(sum), code_of(depth, parent, node.rest & kRestMask, merged));
    const Entry last = lists.at(at);
    before = parent;
    moved = {node.score, node.later, last.score,
             rest_of(node.rest >> kRestShift, last.candidate, at + 1)};
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
  __shared__ Node nodes[kMaxNodes];
  __shared__ int taken;
  const int64_t b = blockIdx.x;
  const int64_t lists_size = int64_t{p.edges ? p.J * p.M : p.J} * p.M;
  const Lists<kStaged> lists{p.score + b * lists_size, smem, p.M, p.edges};

  const int64_t* candidates = p.candidate + b * p.J * p.M;
  for (int i = threadIdx.x; i < p.J * p.M; i += kThreads) tokens[i] = candidates[i];
  const int64_t root = p.root[b];
  lists.sort(p.J);
  __syncthreads();
  if (threadIdx.x < kWarp) {
    codes[0] = 0;  // the root counts as candidate 0: list 0 is its children's
    taken = grow(p, lists, nodes, codes);
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
  } else if (n < taken) {
    const int candidate = codes[n] >> kCandidateShift & kIndexMask;
    depth = codes[n] >> kDepthShift;
    parent = codes[n] >> kParentShift & kIndexMask;
    score = nodes[n].score;
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
  // Each list with its end, and what may be read behind the last one.
  const int entries = (p.edges ? p.J * p.M : p.J) * (p.M + 1) + kAhead;
  const int staged = entries * static_cast<int>(sizeof(Entry));
  if (staged <= kMaxSmem)
    launch(tree_build_kernel<true>, {p.B, kThreads, staged}, stream, p);
  else
    launch(tree_build_kernel<false>, {p.B, kThreads, entries}, stream, p);
}

}  // namespace kdtree::cuda
