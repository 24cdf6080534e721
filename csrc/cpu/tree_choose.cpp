#include <algorithm>
#include <array>
#include <cmath>

#include "common.h"

namespace kdtree::cpu {
namespace {

struct Seen {
  float chance = 0;     // that the node and all of its ancestors come true
  int kind = 0;         // 0 on the spine, 1 beside it, 2 below that
  bool parent = false;  // whether it has a child already
};

// Adds to expected[n] what the first n + 1 nodes of sequence b bring.
void expect(const TreeChooseParams& p, int b) {
  const int64_t row = int64_t{b} * p.N;
  std::array<Seen, kMaxNodes> seen;
  float tokens = 0;
  for (int n = 0; n < p.N; ++n) {
    const int above = p.parent[row + n];
    if (above == -1) seen[n].chance = 1;
    if (above >= 0 && above < n) {
      Seen& parent = seen[above];
      seen[n].kind = parent.kind ? 2 : parent.parent;
      parent.parent = true;
      const float claim = std::min(p.score[row + n] - p.score[row + above], 0.0f);
      const int cell = std::clamp(p.depth[row + n] - 1, 0, kMaxDepth - 1) * kKinds + seen[n].kind;
      seen[n].chance = parent.chance * std::min(std::exp(claim) * p.factor[cell], 1.0f);
    }
    tokens += seen[n].chance;
    p.expected[n] += tokens;
  }
}

}  // namespace

void tree_choose(const TreeChooseParams& p, Stream) {
  std::fill_n(p.expected, p.N, 0.0f);
  for (int b = 0; b < p.B; ++b) expect(p, b);
  float most = 0;
  *p.choice = 0;
  for (int s = 0; s < p.S; ++s) {
    const float rate = p.expected[std::clamp(p.sizes[s], 1, p.N) - 1] / p.seconds[s];
    if (rate > most) most = rate, *p.choice = s;
  }
}

}  // namespace kdtree::cpu
