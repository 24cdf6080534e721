// Prompt look-up: what followed earlier matches of a text's end, and its edge scores.
//
//   match i: the n <= longest tokens up to i are the last n; candidates are what follows the M best
//   by n, then i, both descending
//
// Grid    a cluster of kTeam blocks a sequence; where a text is short by its capacity, one block.
// Tiling  a warp takes every so many-th tile of kTile tokens, the latest first, the next one loaded
//         meanwhile, and keeps the M best keys (n, i) in registers, a lane two of them. A key gets in
//         if it is better than the last of them: as tiles descend, only a longer match is. Warps'
//         keys meet in shared memory, blocks' in that of the first, which writes all results.
// Reads   the known tokens once.
// Floor   8 * length bytes: 2 MB and 0.5 us at 262,144 tokens and 4.8 TB/s (H200), where kTeam blocks
//         a sequence ask for as much as they can; else launch latency and four dependent reads.
// Needs   M <= 64, J <= 15, longest <= 64.
#include <cooperative_groups.h>

#include "common.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kTeam = 8;  // the largest portable cluster
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kUnroll = 8;                 // tokens of a lane in flight
constexpr int kTile = kWarp * kUnroll;
constexpr int kSlots = kMaxNodes / kWarp;  // keys a lane keeps
constexpr int kShort = 4096;               // tokens that one block takes

struct Shared {
  int64_t suffix[kMaxNodes];             // the last tokens, backwards
  uint64_t warps[kWarps * kMaxNodes];    // keys of this block's warps
  uint64_t blocks[kTeam * kMaxNodes];    // of the team's blocks, in the first
  uint64_t best[kMaxNodes];              // of all
  int64_t token[kMaxNodes * kMaxDepth];  // what follows each match
  int known[kMaxNodes];                  // how many of those there are
  int8_t owner[kMaxNodes * kMaxDepth];   // the first match that begins alike
};

// The best keys of a warp, descending: lane l has the places l and l + 32; 0 is none.
struct Best {
  uint64_t key[kSlots] = {};
  uint64_t last = 0;  // the M-th best

  // Each lane offers one key, no two alike but for 0.
  __device__ void offer(uint64_t mine, int M) {
    const int lane = threadIdx.x % kWarp;
    while (const unsigned better = __ballot_sync(~0u, mine > last)) {
      const int from = kWarp - 1 - __clz(better);
      const uint64_t taken = __shfl_sync(~0u, mine, from);
      if (lane == from) mine = 0;
      uint64_t above[kSlots];  // the key at the place before each
      for (int s = 0; s < kSlots; ++s) {
        above[s] = __shfl_up_sync(~0u, key[s], 1);
        const uint64_t carried = s > 0 ? __shfl_sync(~0u, key[s - 1], kWarp - 1) : ~uint64_t{0};
        if (lane == 0) above[s] = carried;
      }
      for (int s = 0; s < kSlots; ++s)
        if (key[s] < taken) key[s] = min(above[s], taken);
      const int place = M - 1;
      last = __shfl_sync(~0u, place < kWarp ? key[0] : key[1], place % kWarp);
    }
  }
  __device__ void store(uint64_t* keys, int M) const {
    for (int s = 0; s < kSlots; ++s) {
      const int place = s * kWarp + threadIdx.x % kWarp;
      if (place < M) keys[place] = key[s];
    }
  }
};

// The best matches that end in this warp's tiles. last: the root's index
__device__ Best scan(const int64_t* text, int last, const NgramMatchParams& p, const Shared& shared,
                     int warp, int warps) {
  const int lane = threadIdx.x % kWarp;
  const auto load = [&](int tile, int64_t(&token)[kUnroll]) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = int64_t{tile} * kTile + u * kWarp + lane;
      token[u] = i >= 0 && i < last ? text[i] : 0;
    }
  };
  Best best;
  int64_t token[kUnroll], next[kUnroll];
  int tile = (last - 1) / kTile - warp;
  load(tile, token);
  for (; tile >= 0; tile -= warps) {
    load(tile - warps, next);
    const int64_t root = shared.suffix[0], before = shared.suffix[p.longest > 1];
    unsigned holds = __ballot_sync(~0u, token[kUnroll - 1] == before);
#pragma unroll
    for (int u = kUnroll - 1; u >= 0; --u) {
      const int end = tile * kTile + u * kWarp + lane;
      const bool hit = end < last && token[u] == root;
      // Lanes behind one that holds `before`, as a match of two does; not known of the tile's first.
      unsigned longer = holds << 1;
      holds = u > 0 ? __ballot_sync(~0u, token[max(u - 1, 0)] == before) : ~0u;
      longer |= holds >> (kWarp - 1);
      if (!__any_sync(~0u, hit)) continue;
      int n = hit;
      if (hit && longer >> lane & 1)
        while (n < p.longest && n <= end && text[end - n] == shared.suffix[n]) ++n;
      best.offer(n ? uint64_t(n) << 32 | end : 0, p.M);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) token[u] = next[u];
  }
  return best;
}

// The M best keys of up to 32 lists of M, each descending. One warp calls it.
__device__ void merge(const uint64_t* lists, int count, int M, uint64_t* out) {
  const int lane = threadIdx.x % kWarp;
  uint64_t head = lane < count ? lists[lane * M] : 0;
  for (int m = 0, at = 0; m < M; ++m) {
    const unsigned n = __reduce_max_sync(~0u, static_cast<unsigned>(head >> 32));
    const unsigned end = __reduce_max_sync(~0u, head >> 32 == n ? static_cast<unsigned>(head) : 0);
    const uint64_t best = uint64_t{n} << 32 | end;
    if (lane == 0) out[m] = best;
    if (best && head == best) head = ++at < M ? lists[lane * M + at] : 0;
  }
}

// Candidates and edges of the best matches. All of a block's threads call it.
__device__ void write(const int64_t* text, int last, const NgramMatchParams& p, Shared& shared,
                      int64_t* candidate, float* score) {
  const int J = p.J, M = p.M;
  for (int i = threadIdx.x; i < M * J; i += kThreads) {
    const int m = i / J, j = i % J;
    const int begin = static_cast<int>(shared.best[m] & ~0u) + 1;
    const int known = shared.best[m] ? min(J, last + 1 - begin) : 0;
    shared.token[i] = j < known ? text[begin + j] : 0;
    candidate[j * M + m] = shared.token[i];
    if (j == 0) shared.known[m] = known;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < M * J; i += kThreads) {
    const int m = i / J, j = i % J;
    const auto alike = [&](int other) {
      if (shared.known[other] <= j) return false;
      for (int k = 0; k <= j; ++k)
        if (shared.token[other * J + k] != shared.token[m * J + k]) return false;
      return true;
    };
    int owner = 0;
    while (owner < m && !alike(owner)) ++owner;
    shared.owner[i] = owner;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < J * M * M; i += kThreads) {
    const int j = i / (M * M), from = i / M % M, m = i % M;
    const bool own = j < shared.known[m] && shared.owner[m * J + j] == m;
    const bool after = from == (j ? shared.owner[m * J + j - 1] : 0);
    score[i] = own && after ? j ? p.next : p.first + p.rank * m : -INFINITY;
  }
}

__global__ void __launch_bounds__(kThreads)
    ngram_match_kernel(const __grid_constant__ NgramMatchParams p) {
  begin_early();
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const auto team = cooperative_groups::this_cluster();
  const int blocks = team.num_blocks(), rank = team.block_rank();
  const int64_t b = blockIdx.x / blocks;
  const int warp = threadIdx.x / kWarp, M = p.M;
  const int64_t* text = p.token + b * p.X;
  const int last = max(min(p.length[b], p.X), 1) - 1;
  if (threadIdx.x < p.longest) shared.suffix[threadIdx.x] = text[max(last - int(threadIdx.x), 0)];
  __syncthreads();

  scan(text, last, p, shared, warp * blocks + rank, kWarps * blocks)
      .store(shared.warps + warp * M, M);
  team.sync();  // the keys are there, and so are all blocks
  if (warp == 0)
    merge(shared.warps, kWarps, M, team.map_shared_rank(shared.blocks, 0) + rank * M);
  team.sync();  // every block's best is in the first
  if (rank > 0) return;
  if (warp == 0) merge(shared.blocks, blocks, M, shared.best);
  __syncthreads();
  write(text, last, p, shared, p.candidate + b * p.J * M, p.score + b * p.J * M * M);
}

}  // namespace

void ngram_match(const NgramMatchParams& p, Stream stream) {
  const int blocks = p.X > kShort ? kTeam : 1;
  const Grid grid{.blocks = p.B * blocks,
                  .threads = kThreads,
                  .smem = smem_up_to<sizeof(Shared)>(),
                  .cluster = blocks,
                  .early = true};
  launch(ngram_match_kernel, grid, stream, p);
}

}  // namespace kdtree::cuda
