// What a tree's first nodes are expected to emit, and the size that brings the most a second.
//
// Grid    one block; a thread holds a node of one sequence after another, and walks up its ancestors.
// Reads   every node once.
// Floor   12 bytes a node: bound by launch latency and two walks of at most 15 steps in
//         shared memory.
// Needs   N <= 64, S <= 64.
#include "common.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

struct Shared {
  int parent[kMaxNodes], depth[kMaxNodes];
  float score[kMaxNodes];
  int first[kMaxNodes];  // a node's first child
  float expected[kMaxNodes];
};

// That node n and all of its ancestors come true. A node's kind is known once it is known whether
// one above it is no best child: the walk goes up and counts them first, then up again.
__device__ float chance_of(const Shared& s, const float* factor, int n) {
  int root = n, beside = 0;  // nodes of the path that are no best children
  for (; s.parent[root] >= 0; root = s.parent[root]) beside += s.first[s.parent[root]] != root;
  if (s.parent[root] != -1) return 0;
  float chance = 1;
  for (int m = n; m != root; m = s.parent[m]) {
    const int above = s.parent[m];
    const bool best = s.first[above] == m;
    beside -= !best;  // those above m
    const int kind = beside ? 2 : !best;
    const float claim = fminf(s.score[m] - s.score[above], 0.0f);
    chance *= fminf(expf(claim) * factor[max(s.depth[m] - 1, 0) * kKinds + kind], 1.0f);
  }
  return chance;
}

__global__ void __launch_bounds__(kMaxNodes)
    tree_choose_kernel(const __grid_constant__ TreeChooseParams p) {
  begin_early();
  __shared__ Shared s;
  const int n = threadIdx.x;
  float tokens = 0;
  for (int b = 0; b < p.B; ++b) {
    const int64_t i = int64_t{b} * p.N + n;
    __syncthreads();
    const int above = n < p.N ? p.parent[i] : -2;
    s.parent[n] = above < n ? above : -2;  // whatever it holds, a walk goes down
    s.depth[n] = n < p.N ? min(p.depth[i], kMaxDepth) : 0;
    s.score[n] = n < p.N ? p.score[i] : 0;
    s.first[n] = kMaxNodes;
    __syncthreads();
    if (s.parent[n] >= 0) atomicMin(&s.first[s.parent[n]], n);
    __syncthreads();
    if (above == -1 || s.parent[n] >= 0) tokens += chance_of(s, p.factor, n);
  }
  s.expected[n] = tokens;
  __syncthreads();
  if (n != 0) return;
  float sum = 0, most = 0;
  for (int m = 0; m < p.N; ++m) p.expected[m] = s.expected[m] = sum += s.expected[m];
  int choice = 0;
  for (int k = 0; k < p.S; ++k) {
    const float rate = s.expected[min(max(p.sizes[k], 1), p.N) - 1] / p.seconds[k];
    if (rate > most) most = rate, choice = k;
  }
  *p.choice = choice;
}

}  // namespace

void tree_choose(const TreeChooseParams& p, Stream stream) {
  launch(tree_choose_kernel, {.blocks = 1, .threads = kMaxNodes, .early = true}, stream, p);
}

}  // namespace kdtree::cuda
