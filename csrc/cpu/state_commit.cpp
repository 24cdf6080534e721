#include <algorithm>
#include <bit>

#include "common.h"

namespace kdtree::cpu {
namespace {

void commit(const StateCommitParams& p, int b) {
  const int64_t* stop = p.stop + int64_t{b} * p.S;
  const int64_t* emitted = p.emitted + int64_t{b} * p.J;
  const float* logprob = p.logprob + int64_t{b} * p.J;
  const int count = std::min(p.count[b], p.J), room = p.limit[b] - p.length[b];

  int stopped = 0;  // the first of them that ends the sequence
  while (stopped < count && std::find(stop, stop + p.S, emitted[stopped]) == stop + p.S) ++stopped;
  const int kept = std::min({count, room, stopped + 1});
  End end = p.failed[b] ? End::failed : End::running;
  if (kept == room) end = End::length;
  if (stopped < kept) end = End::stop;

  for (int i = 0, at = p.length[b]; i < kept && at < p.X; ++i, ++at)
    p.token[int64_t{b} * p.X + at] = emitted[i];
  p.length[b] += kept;
  if (end != End::running) p.active[b] = false;

  int64_t* record = p.record + int64_t{b} * ((p.depth ? 4 : 2) + 2 * p.J);
  if (p.depth) {
    const int32_t* depth = p.depth + int64_t{b} * p.N;
    *record++ = *std::max_element(depth, depth + p.N);
    *record++ = count - 1;
  }
  *record++ = kept;
  *record++ = static_cast<int64_t>(end);
  record = std::copy_n(emitted, p.J, record);
  for (int i = 0; i < p.J; ++i) *record++ = std::bit_cast<int32_t>(logprob[i]);
}

}  // namespace

void state_commit(const StateCommitParams& p, Stream) {
  for (int b = 0; b < p.B; ++b) commit(p, b);
}

}  // namespace kdtree::cpu
