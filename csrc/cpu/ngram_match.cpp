#include <algorithm>
#include <limits>
#include <vector>

#include "common.h"

namespace kdtree::cpu {
namespace {

struct Match {
  int length, end;  // tokens that agree, and the index of the last of them
  bool operator<(const Match& other) const {
    return length != other.length ? length > other.length : end > other.end;
  }
};

// The M best matches of a text's end, best first. last: the root's index
std::vector<Match> best_matches(const int64_t* text, int last, int longest, int M) {
  std::vector<Match> found;
  for (int end = 0; end < last; ++end) {
    int n = 0;
    while (n < longest && n <= end && text[end - n] == text[last - n]) ++n;
    if (n > 0) found.push_back({n, end});
  }
  const size_t kept = std::min(found.size(), static_cast<size_t>(M));
  std::partial_sort(found.begin(), found.begin() + kept, found.end());
  found.resize(kept);
  return found;
}

void match(const NgramMatchParams& p, int b) {
  const int J = p.J, M = p.M, last = std::clamp(p.length[b], 1, p.X) - 1;
  const int64_t* text = p.token + int64_t{b} * p.X;
  int64_t* candidate = p.candidate + int64_t{b} * J * M;
  float* score = p.score + int64_t{b} * J * M * M;
  std::fill_n(candidate, J * M, 0);
  std::fill_n(score, J * M * M, -std::numeric_limits<float>::infinity());

  const std::vector<Match> found = best_matches(text, last, p.longest, M);
  int owner[kMaxNodes] = {};  // of each match's token at the depth: the first that begins alike
  for (int j = 0; j < J; ++j) {
    int before[kMaxNodes];  // owners at the depth before; at depth 0 the root
    std::copy_n(owner, M, before);
    for (int m = 0; m < static_cast<int>(found.size()); ++m) {
      const int at = found[m].end + 1 + j;
      if (at > last) continue;
      const auto alike = [&](int other) {
        const int there = found[other].end + 1 + j;
        return before[other] == before[m] && there <= last && text[there] == text[at];
      };
      candidate[j * M + m] = text[at];
      owner[m] = 0;
      while (!alike(owner[m])) ++owner[m];  // m itself is
      if (owner[m] == m)
        score[(j * M + before[m]) * M + m] = j ? p.next : p.first + p.rank * static_cast<float>(m);
    }
  }
}

}  // namespace

void ngram_match(const NgramMatchParams& p, Stream) {
  for (int b = 0; b < p.B; ++b) match(p, b);
}

}  // namespace kdtree::cpu
