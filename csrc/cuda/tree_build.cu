// Best-first draft tree.
//
//   budget times: of all nodes' children that are not in the tree, take the best by score
//   descending, then depth, parent, candidate; score(child) = score(parent) + min(s, 0)
//
// Grid    one block a sequence. All its threads sort every candidate list, then one warp takes the
//         nodes one by one, then all write the tree.
// Tiling  Lane l of that warp keeps the scores of the best untaken children (heads) of nodes l and
//         l + 32, as bits. Taking a head adds two: the node's next child and the new node's first,
//         whose scores it knew. A step takes the best of these and of the others' minimum, reads
//         that head, and begins the next minimum without it, whose latency hides what the two new
//         heads must know in turn.
// Smem    heads, nodes, tokens and the sorted lists, whose entries say where their children begin;
//         where that is too much only the order of the lists, and scores come from L1 or L2.
// Floor   launch and N - 1 dependent steps of a reduction and a vote. Measured are 320 cycles a
//         step, 0.16 us at 1.98 GHz: 63 of them take 10 us.
// Needs   N <= 64, M <= 64, J <= 15.
#include "common.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kSlots = kMaxNodes / kWarp;  // nodes a lane keeps
constexpr int kPadding = -2;               // parent of a missing node
constexpr int kMaxSmem = 88 * 1024;        // the device's 99 KB less the static arrays

// min(s, 0), and -inf for NaN: scores so clamped sort as the contract wants.
__device__ float clamped(float s) { return s > 0 ? 0.f : s == s ? s : -INFINITY; }

// Scores are never above +0 nor -0, so the better one has the smaller bits; these say "no child".
constexpr uint32_t kNone = 0xff800000;  // -inf; a head that was never set is above it

constexpr int kMerged = 1 << 30;

// The best untaken child of a node, but for its score.
struct __align__(16) Head {
  float sibling, child;  // scores of the node's next child and of this one's first
  int at;                // its entry; kMerged is added where the child before had the same score
  int down;              // where the sibling's children begin
  int children, grandchildren;  // where its own begin, and its first child's
};

// A node of the tree: its head, its own entry and how deep it is.
struct __align__(16) Node {
  Head head;
  float score;
  int at, parent, depth;
};

struct __align__(8) Entry {
  float score;
  int down;  // where the list of its children begins
};

// One sequence's candidate lists: list j, or where edges j * M + m, is sorted by clamped score
// descending, ties to the lower candidate. Two entries without a score end each and lead to a list
// of such: a head that has run through its list never wins, whatever lies behind.
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
    for (int i = threadIdx.x; i < lists * M; i += kThreads) {
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
    for (int i = threadIdx.x; i < stride(M) + 2; i += kThreads)
      set(lists * stride(M) + i, -INFINITY, kMaxNodes, below(J, 0));
  }
};

// Distinct candidates' scores may round to one child score; then the list's order is not the
// contract's. Of the children of a node that share a score, the entry of the one whose turn it is
// when `at` is next in the list.
template <bool kStaged>
__device__ int merged_entry(const Lists<kStaged>& lists, float score, float sum, int at, int lane) {
  const int begin = at / lists.stride(lists.M) * lists.stride(lists.M);
  bool shares[kSlots];
  int candidates[kSlots], first = kMaxNodes;
  uint32_t low = 0, high = 0;  // the set of their candidates
  for (int s = kSlots - 1; s >= 0; --s) {
    const int r = s * kWarp + lane, entry = begin + min(r, lists.M);
    shares[s] = r < lists.M && score + lists[entry].score == sum;
    const unsigned found = __ballot_sync(~0u, shares[s]);
    if (found) first = s * kWarp + __ffs(found) - 1;
    candidates[s] = lists.candidates[entry];
    if (shares[s]) (candidates[s] < kWarp ? low : high) |= 1u << candidates[s] % kWarp;
  }
  const uint64_t high_bits = __reduce_or_sync(~0u, high);
  const uint64_t set = high_bits << kWarp | __reduce_or_sync(~0u, low);
  for (int s = 0; s < kSlots; ++s) {
    const int before = __popcll(set & ((uint64_t{1} << candidates[s] % kMaxNodes) - 1));
    const unsigned it = __ballot_sync(~0u, shares[s] && before == at - begin - first);
    if (it) return begin + s * kWarp + __ffs(it) - 1;
  }
  return at;
}

// A node whose head has a score, as bits.
struct Scored {
  uint32_t key;
  int node;
};

// The heads of a warp's nodes, slot s of lane l that of node s * 32 + l.
struct Frontier {
  int lane;
  uint32_t keys[kSlots] = {~0u, ~0u};

  __device__ void put(int n, uint32_t key) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      if (n == s * kWarp + lane) keys[s] = key;
  }

  // The best; *tied says whether others have its score.
  __device__ Scored best(bool* tied) const {
    const uint32_t key = __reduce_min_sync(~0u, min(keys[0], keys[1]));
    const unsigned low = __ballot_sync(~0u, keys[0] == key);
    const unsigned high = __ballot_sync(~0u, keys[1] == key);
    *tied = __popc(low) + __popc(high) > 1;
    return {key, (low ? 0 : kWarp) + 31 - __clz(low ? low : high)};
  }

  // Of those of a score, the first in depth and node.
  __device__ int first(uint32_t key, const Node* nodes) const {
    const auto order = [&](int n) { return nodes[n].depth * kMaxNodes + n; };
    const uint32_t low = keys[0] == key ? order(lane) : ~0u;
    const uint32_t high = keys[1] == key ? order(kWarp + lane) : ~0u;
    return __reduce_min_sync(~0u, min(low, high)) % kMaxNodes;
  }
};

// Takes nodes until there are N or no child is left; returns how many there are. One warp calls it.
template <bool kStaged>
__device__ int grow(const TreeBuildParams& p, const Lists<kStaged>& lists, Node* nodes) {
  if (p.J == 0 || p.M == 0) return 1;
  Frontier frontier{static_cast<int>(threadIdx.x)};
  const Entry root = lists[0], second = lists[1], first = lists[root.down];
  const float top = 0.f + root.score;
  nodes[0] = {
      {0.f + second.score, top + first.score, 0, second.down, root.down, first.down}, 0.f, 0, 0, 0};
  // The two newest heads, which the frontier does not have yet, and the best of the others.
  Scored sibling{~0u, 1}, child{__float_as_uint(top), 0}, other{~0u, 2};
  bool tied = false;
  int count = 1, chain = p.chain_seed;
  for (; count < p.N; ++count) {
    Scored best = other;
    if (sibling.key < best.key) best = sibling;
    if (child.key < best.key) best = child;
    const int heads_with_it =
        (other.key == best.key) + (sibling.key == best.key) + (child.key == best.key);
    bool unclear = heads_with_it > 1 || (tied && other.key == best.key);
    chain = chain && child.key < kNone;
    if (chain) best = child, unclear = false;
    if (best.key >= kNone) break;

    frontier.put(sibling.node, sibling.key);
    frontier.put(child.node, child.key);
    if (unclear) best.node = frontier.first(best.key, nodes);
    const int node = best.node;
    const float score = __uint_as_float(best.key);
    const Node parent = nodes[node];
    frontier.put(node, ~0u);
    other = frontier.best(&tied);

    Head head = parent.head;
    int at = head.at, merged = 0;
    if (head.sibling == score || at >= kMerged) {
      merged = head.sibling == score ? kMerged : 0;
      head.at &= ~kMerged;
      at = merged_entry(lists, parent.score, score, head.at, frontier.lane);
      head.children = lists[at].down;
      const Entry first = lists[head.children];
      head.child = score + first.score, head.grandchildren = first.down;
    }
    sibling = {__float_as_uint(head.sibling), node};
    child = {__float_as_uint(head.child), count};
    const Entry later = lists[head.at + 2], nephew = lists[head.down];
    const Entry second = lists[head.children + 1], grandchild = lists[head.grandchildren];
    nodes[node].head = {parent.score + later.score,
                        head.sibling + nephew.score,
                        (head.at + 1) | merged,
                        later.down,
                        head.down,
                        nephew.down};
    nodes[count] = {{score + second.score, head.child + grandchild.score, head.children,
                     second.down, head.grandchildren, grandchild.down},
                    score,
                    at,
                    node,
                    parent.depth + 1};
  }
  return count;
}

template <bool kStaged>
__global__ void __launch_bounds__(kThreads)
    tree_build_kernel(const __grid_constant__ TreeBuildParams p) {
  extern __shared__ __align__(16) char smem[];
  __shared__ int64_t tokens[kMaxDepth * kMaxNodes];
  __shared__ int taken;
  Node* nodes = reinterpret_cast<Node*>(smem);
  Entry* entries = reinterpret_cast<Entry*>(nodes + kMaxNodes);
  const int size = Lists<kStaged>::size(p.J, p.M, p.edges);
  uint8_t* order = reinterpret_cast<uint8_t*>(entries + (kStaged ? size : 0));
  const int64_t b = blockIdx.x;
  const int64_t lists_size = int64_t{p.edges ? p.J * p.M : p.J} * p.M;
  const Lists<kStaged> lists{p.score + b * lists_size, entries, order, p.J, p.M, p.edges};

  const int64_t* candidates = p.candidate + b * p.J * p.M;
  for (int i = threadIdx.x; i < p.J * p.M; i += kThreads) tokens[i] = candidates[i];
  const int64_t root = p.root[b];
  lists.sort();
  __syncthreads();
  if (threadIdx.x < kWarp) taken = grow(p, lists, nodes);
  __syncthreads();

  const int n = threadIdx.x;
  const int64_t out = b * p.N + n;
  if (n >= p.N) return;
  int64_t token = 0, ancestors = 0;
  int parent = kPadding, depth = 0;
  float score = -INFINITY;
  if (n == 0) {
    token = root, ancestors = 1, parent = -1, score = 0;
  } else if (n < taken) {
    const Node node = nodes[n];
    depth = node.depth, parent = node.parent, score = node.score;
    token = tokens[(depth - 1) * p.M + lists.candidates[node.at]];
    ancestors = 1;  // the root
    for (int a = n; a > 0; a = nodes[a].parent) ancestors |= int64_t{1} << a;
  }
  p.token[out] = token;
  p.parent[out] = parent;
  p.depth[out] = depth;
  p.ancestors[out] = ancestors;
  p.node_score[out] = score;
}

}  // namespace

void tree_build(const TreeBuildParams& p, Stream stream) {
  const int size = Lists<true>::size(p.J, p.M, p.edges);
  const int tree = kMaxNodes * static_cast<int>(sizeof(Node));
  const int staged = tree + size * static_cast<int>(sizeof(Entry) + 1);
  if (staged <= kMaxSmem)
    launch(tree_build_kernel<true>, {p.B, kThreads, staged}, stream, p);
  else
    launch(tree_build_kernel<false>, {p.B, kThreads, tree + size}, stream, p);
}

}  // namespace kdtree::cuda
