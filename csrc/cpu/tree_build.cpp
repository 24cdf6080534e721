#include <algorithm>
#include <cmath>
#include <queue>
#include <vector>

#include "common.h"

namespace kdtree::cpu {
namespace {

constexpr int kPadding = -2;  // parent of a missing node

struct Child {
  float score;
  int depth, parent, candidate;  // of the child; its parent node; its place among its depth's M
};

// Whether b is taken before a: the order of the contract.
struct Later {
  bool operator()(const Child& a, const Child& b) const {
    if (a.score != b.score) return a.score < b.score;
    if (a.depth != b.depth) return a.depth > b.depth;
    if (a.parent != b.parent) return a.parent > b.parent;
    return a.candidate > b.candidate;
  }
};

// One sequence's tree as it grows.
class Tree {
 public:
  Tree(const TreeBuildParams& p, int b) : p(p), b(b), row(int64_t{b} * p.N), candidates(p.N) {
    if (p.active && !p.active[b]) return;
    count = 1;
    p.token[row] = root_of(p.root, p.length, p.X, b);
    p.parent[row] = -1;
    p.depth[row] = 0;
    p.ancestors[row] = 1;
    p.node_score[row] = 0;
  }

  int nodes() const { return count; }
  bool full() const { return count == p.N; }

  // The takeable children of a node.
  std::vector<Child> children(int node) const {
    std::vector<Child> found;
    const int depth = p.depth[row + node];
    if (depth == p.J) return found;
    const int64_t list = int64_t{b} * p.J + depth;
    const float* score = p.score + (p.edges ? list * p.M + candidates[node] : list) * p.M;
    for (int m = 0; m < p.M; ++m) {
      const float sum = p.node_score[row + node] + (score[m] > 0 ? 0 : score[m]);
      if (sum > -INFINITY) found.push_back({sum, depth + 1, node, m});
    }
    return found;
  }

  void take(const Child& c) {
    const int n = count++;
    p.token[row + n] = p.candidate[(int64_t{b} * p.J + c.depth - 1) * p.M + c.candidate];
    p.parent[row + n] = c.parent;
    p.depth[row + n] = c.depth;
    p.ancestors[row + n] = p.ancestors[row + c.parent] | int64_t{1} << n;
    p.node_score[row + n] = c.score;
    candidates[n] = c.candidate;
  }

  void pad() {
    for (int n = count; n < p.N; ++n) {
      p.token[row + n] = 0;
      p.parent[row + n] = kPadding;
      p.depth[row + n] = 0;
      p.ancestors[row + n] = 0;
      p.node_score[row + n] = -INFINITY;
    }
  }

 private:
  const TreeBuildParams& p;
  const int b;
  const int64_t row;
  std::vector<int> candidates;  // each node's place among its depth's M; the root's is 0
  int count = 0;
};

void build(const TreeBuildParams& p, int b) {
  Tree tree(p, b);
  std::priority_queue<Child, std::vector<Child>, Later> frontier;
  if (tree.nodes() == 0) return tree.pad();
  std::vector<Child> opened = tree.children(0);  // of the newest node

  // The chain takes the newest node's best child; the others wait in the frontier.
  while (p.chain_seed && !tree.full() && !opened.empty()) {
    const auto best = std::max_element(opened.begin(), opened.end(), Later());
    tree.take(*best);
    opened.erase(best);
    for (const Child& c : opened) frontier.push(c);
    opened = tree.children(tree.nodes() - 1);
  }

  for (const Child& c : opened) frontier.push(c);
  while (!tree.full() && !frontier.empty()) {
    const Child best = frontier.top();
    frontier.pop();
    tree.take(best);
    for (const Child& c : tree.children(tree.nodes() - 1)) frontier.push(c);
  }
  tree.pad();
}

}  // namespace

void tree_build(const TreeBuildParams& p, Stream) {
  for (int b = 0; b < p.B; ++b) build(p, b);
}

}  // namespace kdtree::cpu
