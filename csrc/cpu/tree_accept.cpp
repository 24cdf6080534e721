#include "common.h"

namespace kdtree::cpu {
namespace {

constexpr int kPadding = -2;  // parent of a missing node

// The earliest child of node that carries token, or -1. Children stand after their parent, so a
// walk ends whatever the array holds.
int child_with(const int64_t* token, const int32_t* parent, int N, int node, int64_t wanted) {
  if (wanted < 0) return -1;
  for (int child = node + 1; child < N; ++child)
    if (parent[child] == node && token[child] == wanted) return child;
  return -1;
}

void accept(const TreeAcceptParams& p, int b) {
  const int64_t row = int64_t{b} * p.N;
  int32_t* path = p.path + int64_t{b} * p.J;
  int64_t* tokens = p.tokens + int64_t{b} * p.J;
  float* logprobs = p.logprobs + int64_t{b} * p.J;

  int length = 0;
  bool failed = false;
  int node = p.parent[row] == kPadding ? -1 : 0;
  while (node >= 0 && length < p.J && !failed) {
    if (p.finite[row + node]) {
      path[length] = node;
      logprobs[length] = p.logprob[row + node];
      tokens[length++] = p.target[row + node];
      node = child_with(p.token + row, p.parent + row, p.N, node, p.target[row + node]);
    } else {
      failed = true;
    }
  }
  p.length[b] = length;
  p.failed[b] = failed;
  for (int i = length; i < p.J; ++i) path[i] = -1, tokens[i] = -1, logprobs[i] = 0;
}

}  // namespace

void tree_accept(const TreeAcceptParams& p, Stream) {
  for (int b = 0; b < p.B; ++b) accept(p, b);
}

}  // namespace kdtree::cpu
