// Best-first draft tree.
//
//   budget times: of all nodes' children that are not in the tree, take the best by score
//   descending, then depth, parent, candidate; score(child) = score(parent) + min(s, 0)
//
// Grid    one block a sequence. All its threads sort every candidate list, then one warp takes the
//         nodes several at a time, then all put them in order and write the tree.
// Tiling  Lane l of that warp keeps the best untaken children (heads) of nodes l and l + 32. What
//         may follow a head, its next sibling and its own first child, is never better than it; so
//         every head at least as good as the best of all followers comes before all of those, and
//         one step takes them all. Where one of the same score and depth was left out of a tree that
//         is full, which is to be the last cannot be told: then it is grown anew, node by node.
// Smem    nodes, tokens and the sorted lists, whose entries say where their children begin; where
//         that is too much only the order of the lists, and scores come from L1 or L2.
// Floor   launch and about 25 dependent steps (63 nodes) of a reduction, a vote and three reads.
// Needs   N <= 64, M <= 64, J <= 15.
#include "early.cuh"
#include "tree_lists.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kSlots = kMaxNodes / kWarp;  // nodes a lane keeps
constexpr int kTaken = 2 * kMaxNodes;      // a last step may take more than N, of at most N heads
constexpr int kPadding = -2;               // parent of a missing node
constexpr int kMaxSmem = 84 * 1024;        // the device's 99 KB less the static arrays

// A node of the tree: its score, its candidate among its depth's, where its children begin.
struct __align__(16) Node {
  float score;
  int16_t parent, depth;
  int candidate, children;
};

// What grew, in shared memory: no nodes where the order of some could not be told. The first
// `chained` are in order; of those left out the best has `bound`, as bits, and at least `depth`.
struct Grown {
  int count, chained;
  uint32_t bound;
  int depth;
};

// Takes heads, several a step, until there are N or no child is left. One warp calls it.
template <bool kStaged>
__device__ Grown grow(const TreeBuildParams& p, const Lists<kStaged>& lists, Node* nodes) {
  Grown grown{1, 1, kNone, 0};
  if (p.J == 0 || p.M == 0) return grown;
  const int lane = threadIdx.x;
  unsigned before;  // the lanes below; volatile so that the loop does not work it out again
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(before));
  float above[kSlots] = {-INFINITY, -INFINITY};  // score of the head's node
  int at[kSlots] = {}, depth[kSlots] = {};       // the head's entry, its node's depth
  nodes[0] = {0.f, -1, 0, 0, 0};
  bool chain = p.chain_seed;
  for (int opened = 0; grown.count < p.N;) {
    __syncwarp();
    Entry head[kSlots], sibling[kSlots];
    uint32_t key[kSlots], beside[kSlots], below[kSlots];
    int candidate[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int n = s * kWarp + lane;
      const Node node = nodes[n];
      const bool newest = opened <= n && n < grown.count;
      above[s] = newest ? node.score : above[s];
      at[s] = newest ? node.children : at[s];
      depth[s] = newest ? node.depth : depth[s];
    }
    opened = grown.count;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      head[s] = lists[at[s]], sibling[s] = lists[at[s] + 1];
      candidate[s] = lists.candidates[at[s]];
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const float score = above[s] + head[s].score;
      key[s] = __float_as_uint(score);
      beside[s] = __float_as_uint(above[s] + sibling[s].score);
      below[s] = __float_as_uint(score + lists[head[s].down].score);
    }
    grown.bound = __reduce_min_sync(~0u, min(min(beside[0], below[0]), min(beside[1], below[1])));
    bool take[kSlots], merged = false;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const uint32_t seed = s * kWarp + lane == grown.count - 1 ? kNone : 0;
      take[s] = key[s] < (chain ? seed : min(grown.bound + 1, kNone));
      merged |= take[s] && beside[s] == key[s];
    }
    // Children of one score go by their candidates, which the sorted list does not.
    if (chain && __any_sync(~0u, merged)) return {};
    const unsigned low = __ballot_sync(~0u, take[0]), high = __ballot_sync(~0u, take[1]);
    const int place[kSlots] = {__popc(low & before), __popc(low) + __popc(high & before)};
    const int count = grown.count + __popc(low) + __popc(high);
    if (count >= p.N) {
      int least = kMaxNodes;
      for (int s = 0; s < kSlots; ++s) {
        if (below[s] == grown.bound) least = min(least, depth[s] + 2);
        if (beside[s] == grown.bound) least = min(least, depth[s] + 1);
      }
      grown.depth = __reduce_min_sync(~0u, least);
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (!take[s]) continue;
      nodes[grown.count + place[s]] = {
          __uint_as_float(key[s]), static_cast<int16_t>(s * kWarp + lane),
          static_cast<int16_t>(depth[s] + 1), candidate[s], head[s].down};
      ++at[s];
    }
    if (!chain && count == grown.count) break;
    chain = chain && count > grown.count;
    grown.count = count;
    if (chain) grown.chained = count;
  }
  return grown;
}

// Whether node a comes before node b, of the same score: by the contract's order, and that of their
// first ancestors that differ.
__device__ bool tied_before(const Node* nodes, int chained, int a, int b) {
  while (true) {
    const Node x = nodes[a], y = nodes[b];
    if (a < chained || b < chained) return a < b;
    if (x.score != y.score) return x.score > y.score;
    if (x.depth != y.depth) return x.depth < y.depth;
    if (x.parent == y.parent) return x.candidate < y.candidate;
    a = x.parent, b = y.parent;
  }
}

// Puts the nodes in order, into `sorted`. All threads call it. False where one that was left out may
// come before the N-th.
__device__ bool put_in_order(const Grown& grown, int N, const Node* nodes, Node* sorted,
                             int* places) {
  constexpr int kShare = kThreads / kTaken;  // threads that place one node
  const int n = threadIdx.x / kShare, count = grown.count;
  const float score = nodes[n].score;
  int rank = 0;
  for (int other = threadIdx.x % kShare; n < count && other < count; other += kShare) {
    const float theirs = nodes[other].score;
    bool first = theirs > score;
    if (theirs == score) first = other != n && tied_before(nodes, grown.chained, other, n);
    if (other < grown.chained || n < grown.chained) first = other < n;
    rank += first;
  }
  for (int d = kShare / 2; d > 0; d /= 2) rank += __shfl_xor_sync(~0u, rank, d);
  const bool places_it = n < count && threadIdx.x % kShare == 0;
  if (places_it) places[n] = rank;
  __syncthreads();
  if (places_it) {
    Node node = nodes[n];
    if (n > 0) node.parent = static_cast<int16_t>(places[node.parent]);
    sorted[rank] = node;
  }
  __syncthreads();
  if (count < N || grown.chained >= N) return count > 0;
  const uint32_t last = __float_as_uint(sorted[N - 1].score);
  return last < grown.bound || (last == grown.bound && sorted[N - 1].depth < grown.depth);
}

// The best untaken child of a node, and those taken.
struct __align__(16) Open {
  uint64_t taken;
  uint32_t key;
  int candidate;
};

// The same tree one node at a time, from the scores as they are. One warp calls it.
__device__ int grow_one_by_one(const TreeBuildParams& p, const float* score, Node* nodes,
                               Open* open) {
  const int lane = threadIdx.x;
  const auto find = [&](int n, uint64_t taken) {
    const Node node = nodes[n];
    const float* list = score + (p.edges ? node.depth * p.M + node.candidate : node.depth) * p.M;
    uint32_t keys[kSlots];
    for (int s = 0; s < kSlots; ++s) {
      const int m = s * kWarp + lane;
      const bool left = node.depth < p.J && m < p.M && !(taken >> m & 1);
      keys[s] = left ? __float_as_uint(node.score + clamped(list[m])) : ~0u;
    }
    const uint32_t key = __reduce_min_sync(~0u, min(keys[0], keys[1]));
    const unsigned low = __ballot_sync(~0u, keys[0] == key);
    const unsigned high = __ballot_sync(~0u, keys[1] == key);
    open[n] = {taken, key, low ? __ffs(low) - 1 : kWarp + __ffs(high) - 1};
    __syncwarp();
  };
  nodes[0] = {0.f, -1, 0, 0, 0};
  __syncwarp();
  find(0, 0);
  int count = 1;
  for (bool chain = p.chain_seed; count < p.N; ++count) {
    int parent = count - 1;
    chain = chain && open[parent].key < kNone;
    if (!chain) {
      uint32_t keys[kSlots], order[kSlots];
      for (int s = 0; s < kSlots; ++s) {
        const int n = s * kWarp + lane;
        keys[s] = n < count ? open[n].key : ~0u;
        order[s] = n < count ? nodes[n].depth * kMaxNodes + n : ~0u;
      }
      const uint32_t key = __reduce_min_sync(~0u, min(keys[0], keys[1]));
      if (key >= kNone) break;
      for (int s = 0; s < kSlots; ++s)
        if (keys[s] != key) order[s] = ~0u;
      parent = __reduce_min_sync(~0u, min(order[0], order[1])) % kMaxNodes;
    }
    const Open from = open[parent];
    nodes[count] = {__uint_as_float(from.key), int16_t(parent), int16_t(nodes[parent].depth + 1),
                    from.candidate, 0};
    __syncwarp();
    find(parent, from.taken | uint64_t{1} << from.candidate);
    find(count, 0);
  }
  return count;
}

// Missing nodes in place of a tree.
__device__ void pad(const TreeBuildParams& p, int64_t b) {
  const int64_t out = b * p.N + threadIdx.x;
  if (threadIdx.x >= p.N) return;
  p.token[out] = 0;
  p.parent[out] = kPadding;
  p.depth[out] = 0;
  p.ancestors[out] = 0;
  p.node_score[out] = -INFINITY;
}

template <bool kStaged>
__global__ void __launch_bounds__(kThreads)
    tree_build_kernel(const __grid_constant__ TreeBuildParams p) {
  begin_early();
  extern __shared__ __align__(16) char smem[];
  __shared__ int64_t tokens[kMaxDepth * kMaxNodes];
  __shared__ Node taken[kTaken], nodes[kTaken];
  __shared__ Open open[kMaxNodes];
  __shared__ int places[kTaken];
  __shared__ Grown grown;
  Entry* entries = reinterpret_cast<Entry*>(smem);
  const int size = Lists<kStaged>::size(p.J, p.M, p.edges);
  uint8_t* order = reinterpret_cast<uint8_t*>(entries + (kStaged ? size : 0));
  const int64_t b = blockIdx.x;
  if (p.active && !p.active[b]) return pad(p, b);
  const int64_t lists_size = int64_t{p.edges ? p.J * p.M : p.J} * p.M;
  const Lists<kStaged> lists{p.score + b * lists_size, entries, order, p.J, p.M, p.edges};

  const int64_t* candidates = p.candidate + b * p.J * p.M;
  for (int i = threadIdx.x; i < p.J * p.M; i += kThreads) tokens[i] = candidates[i];
  const int64_t root = root_of(p.root, p.length, p.X, b);
  lists.sort();
  __syncthreads();
  if (threadIdx.x < kWarp) grown = grow(p, lists, taken);
  __syncthreads();
  if (!put_in_order(grown, p.N, taken, nodes, places)) {
    if (threadIdx.x < kWarp) grown.count = grow_one_by_one(p, lists.score, nodes, open);
    __syncthreads();
  }

  const int n = threadIdx.x;
  const int64_t out = b * p.N + n;
  if (n >= p.N) return;
  int64_t token = 0, ancestors = 0;
  int parent = kPadding, depth = 0;
  float score = -INFINITY;
  if (n == 0) {
    token = root, ancestors = 1, parent = -1, score = 0;
  } else if (n < grown.count) {
    const Node node = nodes[n];
    depth = node.depth, parent = node.parent, score = node.score;
    token = tokens[(depth - 1) * p.M + node.candidate];
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
  const int staged = size * static_cast<int>(sizeof(Entry) + 1);
  Grid grid{.blocks = p.B, .threads = kThreads, .early = true};
  dispatch(staged <= kMaxSmem, [&](auto stages) {
    grid.smem = smem_up_to<kMaxSmem>(stages ? staged : size);
    launch(tree_build_kernel<stages>, grid, stream, p);
  });
}

}  // namespace kdtree::cuda
