// Walk of a draft tree by the target's own draws.
//
//   node = root; while finite[node]: take it, emit target[node], go to its earliest child that
//   carries that token
//
// Grid    one warp a sequence; a lane holds nodes lane and lane + 32 in registers.
// Reads   every node once.
// Floor   25 bytes a node, at most 1.6 KB a sequence: bound by launch latency and one load.
// Needs   N <= 64.
#include "common.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kPadding = -2;  // parent of a missing node
constexpr int kSlots = kMaxNodes / kWarp;

struct Node {
  int64_t token, target;
  float logprob;
  int parent;
  bool finite;
};

__global__ void __launch_bounds__(kWarp)
    tree_accept_kernel(const __grid_constant__ TreeAcceptParams p) {
  begin_early();
  const int lane = threadIdx.x;
  const int64_t row = int64_t{blockIdx.x} * p.N;
  int32_t* path = p.path + int64_t{blockIdx.x} * p.J;
  int64_t* tokens = p.tokens + int64_t{blockIdx.x} * p.J;
  float* logprobs = p.logprobs + int64_t{blockIdx.x} * p.J;

  Node nodes[kSlots];
  for (int s = 0; s < kSlots; ++s) {
    const int n = s * kWarp + lane;
    nodes[s] = n < p.N ? Node{p.token[row + n], p.target[row + n], p.logprob[row + n],
                              p.parent[row + n], p.finite[row + n]}
                       : Node{-1, -1, 0, kPadding, true};
  }

  // Every lane knows the node; children stand after their parent, so the walk ends whatever parent
  // holds.
  int length = 0;
  bool failed = false;
  int node = __shfl_sync(~0u, nodes[0].parent, 0) == kPadding ? kMaxNodes : 0;
  while (node < kMaxNodes && length < p.J && !failed) {
    const bool upper = node >= kWarp;
    const int64_t target =
        __shfl_sync(~0u, upper ? nodes[1].target : nodes[0].target, node % kWarp);
    failed = !__shfl_sync(~0u, int(upper ? nodes[1].finite : nodes[0].finite), node % kWarp);
    if (failed) break;
    const float logprob =
        __shfl_sync(~0u, upper ? nodes[1].logprob : nodes[0].logprob, node % kWarp);
    if (lane == 0) path[length] = node, tokens[length] = target, logprobs[length] = logprob;
    ++length;
    int next = kMaxNodes;
    for (int s = kSlots - 1; s >= 0; --s) {
      const bool child = nodes[s].parent == node && nodes[s].token == target && target >= 0 &&
                         s * kWarp + lane > node;
      const unsigned found = __ballot_sync(~0u, child);
      if (found) next = s * kWarp + __ffs(found) - 1;
    }
    node = next;
  }
  for (int i = length + lane; i < p.J; i += kWarp) path[i] = -1, tokens[i] = -1, logprobs[i] = 0;
  if (lane == 0) p.length[blockIdx.x] = length, p.failed[blockIdx.x] = failed;
}

}  // namespace

void tree_accept(const TreeAcceptParams& p, Stream stream) {
  launch(tree_accept_kernel, {.blocks = p.B, .threads = kWarp, .early = true}, stream, p);
}

}  // namespace kdtree::cuda
