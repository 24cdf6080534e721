// What a round emitted is appended to what a sequence knows; the round's record.
//
//   kept = min(count, limit - length, 1 + the first of the emitted tokens that is in stop)
//
// Grid    one warp a sequence. A lane holds stop tokens lane and lane + 32 and one of 32 emitted
//         tokens at a time; the first that stops is found by votes.
// Reads   everything once, at once.
// Floor   8 * S + 12 * J bytes a sequence: launch latency and one load.
// Needs   S <= 64.
#include "common.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kSlots = kMaxStops / kWarp;

__global__ void __launch_bounds__(kWarp)
    state_commit_kernel(const __grid_constant__ StateCommitParams p) {
  begin_early();
  const int b = blockIdx.x, lane = threadIdx.x;
  const int64_t* emitted = p.emitted + int64_t{b} * p.J;
  const float* logprob = p.logprob + int64_t{b} * p.J;
  const int before = p.depth ? 2 : 0;
  int64_t* record = p.record + int64_t{b} * (before + 2 + 2 * p.J) + before;

  int64_t stop[kSlots];
  for (int s = 0; s < kSlots; ++s) {
    const int i = s * kWarp + lane;
    stop[s] = p.stop[int64_t{b} * p.S + min(i, p.S - 1)];
  }
  const int count = min(p.count[b], p.J), length = p.length[b], room = p.limit[b] - length;
  const bool failed = p.failed[b];
  int deepest = 0;
  for (int n = lane; p.depth && n < p.N; n += kWarp)
    deepest = max(deepest, p.depth[int64_t{b} * p.N + n]);
  deepest = __reduce_max_sync(~0u, deepest);

  int stopped = count;
  for (int first = 0; first < p.J; first += kWarp) {
    const int i = first + lane;
    const int64_t token = i < p.J ? emitted[i] : 0;
    if (i < p.J) {
      record[2 + i] = token;
      record[2 + p.J + i] = __float_as_int(logprob[i]);
    }
    for (int k = 0; k < kWarp && first + k < stopped; ++k) {
      const int64_t one = __shfl_sync(~0u, token, k);
      if (__any_sync(~0u, one == stop[0] || one == stop[1])) stopped = first + k;
    }
  }
  const int kept = min(min(count, room), stopped + 1);
  End end = failed ? End::failed : End::running;
  if (kept == room) end = End::length;
  if (stopped < kept) end = End::stop;

  for (int i = lane; i < kept; i += kWarp)
    if (length + i < p.X) p.token[int64_t{b} * p.X + length + i] = emitted[i];
  if (lane > 0) return;
  p.length[b] = length + kept;
  if (end != End::running) p.active[b] = false;
  if (p.depth) record[-2] = deepest, record[-1] = count - 1;
  record[0] = kept, record[1] = static_cast<int64_t>(end);
}

}  // namespace

void state_commit(const StateCommitParams& p, Stream stream) {
  launch(state_commit_kernel, {.blocks = p.B, .threads = kWarp, .early = true}, stream, p);
}

}  // namespace kdtree::cuda
