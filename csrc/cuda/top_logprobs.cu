// The k best of each row.
//
//   id[t] = the k largest logits, best first, ties to the lower id
//   logprob[t, i] = logits[t, id[t, i]] - logsumexp(logits[t])
//
// Grid    a cluster of kTeam blocks a row; each reads its share of the row in 16-byte vectors.
// Reads   the row once from HBM, then from L1 and L2: once a digit of the select (4 to 5 of 8 where
//         values differ), once for the sum.
// Floor   4 * T * W bytes of HBM: 0.66 MB and 0.14 us a row at W = 163840 and 4.8 TB/s (H200), so
//         a few rows are bound by the passes and the cluster's barriers, about 2 us each.
// Needs   k <= 64, k <= W <= 2^24.
#include "early.cuh"
#include "select.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kMaxBest = kRowThreads / kTeam;  // one thread a block's place for a code

struct Best {
  uint64_t code[kMaxBest];
  int count;
};

__global__ void __launch_bounds__(kRowThreads)
    top_logprobs_kernel(const __grid_constant__ TopLogprobsParams p) {
  begin_early();
  __shared__ Best best;
  __shared__ uint64_t gathered[kMaxBest];
  const int64_t t = blockIdx.x / kTeam;
  const float* row = p.logits + t * p.W;

  uint64_t top = 0;
  for_share(row, p.W, [&](int id, const float (&x)[kQuad]) {
    for (int i = 0; i < kQuad; ++i) top = max(top, rank_of(x[i], id + i));
  });
  const float max = value_of(team_max(top) >> 32);
  const uint64_t last =
      last_code(row, p.W, p.k, true, [&](int id, float x, uint64_t& code, uint64_t& weight) {
        code = code_of(x, max, id), weight = 1;
        return id < p.W;
      });

  if (threadIdx.x == 0) best.count = 0;
  __syncthreads();
  uint64_t mass = 0;
  for_share(row, p.W, [&](int id, const float (&x)[kQuad]) {
    for (int i = 0; i < kQuad; ++i) {
      const uint64_t code = code_of(x[i], max, id + i);
      mass += mass_of(x[i] - max);
      if (code <= last && id + i < p.W) best.code[atomicAdd(&best.count, 1)] = code;
    }
  });
  mass = team_sum(mass);  // its barriers also complete every block's best

  if (team().block_rank() == 0) {
    const int peer = threadIdx.x / kMaxBest, i = threadIdx.x % kMaxBest;
    int place = i;
    for (int r = 0; r < peer; ++r) place += team().map_shared_rank(&best, r)->count;
    const Best* theirs = team().map_shared_rank(&best, peer);
    if (i < theirs->count) gathered[place] = theirs->code[i];
    __syncthreads();
    if (threadIdx.x < p.k) {
      const uint64_t code = gathered[threadIdx.x];
      int order = 0;
      for (int j = 0; j < p.k; ++j) order += gathered[j] < code;
      p.id[t * p.k + order] = id_of(code);
      p.logprob[t * p.k + order] = logprob_of(value_of_code(code), max, mass);
    }
  }
  team().sync();  // no block leaves before its best is read
}

}  // namespace

void top_logprobs(const TopLogprobsParams& p, Stream stream) {
  const Grid grid{
      .blocks = p.T * kTeam, .threads = kRowThreads, .cluster = kTeam, .early = true};
  launch(top_logprobs_kernel, grid, stream, p);
}

}  // namespace kdtree::cuda
