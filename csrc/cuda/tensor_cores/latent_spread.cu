// mla_attention's splits for latents of 512 + 64 features in bf16, by wgmma, where rows are few: see
// latent.cuh. For sm_90a.
//
// Grid    x = (sequence, 64 rows, kBlocks of a cluster), y = splits, each cluster walking some of them.
// Tiling  a round is a tile for each block of the cluster, which scores it; the tops of its rows and
//         its weights go to all of them, and each adds its slice of the features of all tiles: the
//         length of a split is that of a round, the time that of a tile and of these products.
// Smem    the block's tile, the slice of the others', weights and before them queries: 195 KB.
// Floor   as of latent_sm90.cu; for each tile a block reads 64 (kBlocks - 1) / kBlocks KB more, from L2,
//         and 8 (kBlocks - 1) KB of weights from its neighbours.
// Needs   q and cache on 16 bytes; 4 heads, so that a tile's nodes are 15 apart at most.
#include "latent_spread.cuh"
#include "tensor_map.cuh"

namespace kdtree::cuda {
namespace {

using namespace latent_sm90_parts;

// By one warp: copies of the cluster's rounds, in turn.
struct Filler {
  const LatentTensors& t;
  SpreadSmem& s;
  int rank, b;

  __device__ void begin_walk(int most) {
    if (threadIdx.x % kWarp == 0) {
      Walk walk{.splits = splits_of(most), .most = most, .round = -1};
      walk.next(kBlocks * kTileKeys);
      s.walk = walk;
    }
    __syncwarp();
  }
  __device__ bool more() const { return s.walk.part >= 0; }

  __device__ void fill() {
    const int lane = threadIdx.x % kWarp;
    const int32_t* table = table_of(t.job, b);
    Walk walk = s.walk;
    const int at = walk.at, left = walk.end - at, part = walk.part;
    const int tiles = min(ceil_div(left, kTileKeys), kBlocks);
    const int page = lane < tiles ? table[at / kPage + lane] : 0;
    const bool own = rank < tiles;
    const uint32_t rest = shared_address(&s.others_full);
    __syncwarp();
    if (lane == 0) {
      const bool more = walk.next(kBlocks * kTileKeys);
      s.round = {at, tiles, min(left - (tiles - 1) * kTileKeys, kTileKeys),
                         walk.part == part ? -1 : part, !more};
      s.walk = walk;
      for (uint64_t& full : s.full)
        Barrier::expect(shared_address(&full), own ? kShareBoxes * kBox : 0);
      Barrier::expect(rest, (tiles - own) * kSliceBoxes * kBox);
    }
    __syncwarp();
    const int own_page = __shfl_sync(~0u, page, rank);
    if (own && lane < kBoxes)
      tensor_copy(shared_address(s.own) + lane * kBox, t.cache, lane * kBoxWidth, 0, own_page,
                  shared_address(&s.full[lane / kShareBoxes]));
    const int tile = lane / kSliceBoxes % kBlocks, box = lane % kSliceBoxes;
    const int its_page = __shfl_sync(~0u, page, tile);
    if (lane < kBlocks * kSliceBoxes && tile < tiles && tile != rank)
      tensor_copy(shared_address(s.others[SpreadSmem::other(tile, rank)]) + box * kBox, t.cache,
                  (rank * kSliceBoxes + box) * kBoxWidth, 0, its_page, rest);
  }
  __device__ void load_queries(int row) {
    const int lane = threadIdx.x % kWarp;
    const uint32_t full = shared_address(&s.q_full), to = shared_address(s.weights[0]);
    if (lane == 0) Barrier::expect(full, kTileBytes);
    __syncwarp();
    if (lane < kBoxes) tensor_copy(to + lane * kBox, t.q, lane * kBoxWidth, row, 0, full);
  }
  __device__ void refill(int round) {
    if (!more()) return;
    Barrier::wait_for_cluster(shared_address(&s.done), round % 2);
    fill();
  }
};

__device__ inline void begin_barriers(SpreadSmem& s) {
  const auto init = [](uint64_t& barrier, int arrivals) {
    Barrier::init(shared_address(&barrier), arrivals);
  };
  for (int i = 0; i < kBlocks; ++i) init(s.weighed[i], 1);
  for (uint64_t& full : s.full) init(full, 1);
  init(s.others_full, 1), init(s.q_full, 1), init(s.tops[0], 1), init(s.tops[1], 1);
  init(s.done, kBlocks * kGroupWarps);
  Barrier::fence_init();
}

__global__ void __launch_bounds__(kSpreadThreads, 1)
    latent_spread_kernel(const __grid_constant__ LatentTensors t) {
  extern __shared__ __align__(1024) char bytes[];
  auto& s = *reinterpret_cast<SpreadSmem*>(bytes);
  const LatentJob& job = t.job;
  const MlaAttentionParams& p = job.p;
  const Rows rows(job, blockIdx.x / kBlocks);
  const int rank = cluster_rank(), lane = threadIdx.x % kWarp;
  const bool fills = threadIdx.x / kWarp == kGroupWarps;
  Filler filler{.t = t, .s = s, .rank = rank, .b = rows.b};
  if (threadIdx.x == kGroup) begin_barriers(s), tensor_ready(t.q), tensor_ready(t.cache);
  __syncwarp();
  cluster_arrive();
  wait_for_previous();
  let_next_begin();
  if (fills) filler.load_queries(rows.first_query(job));
  int body = 0;
  if (threadIdx.x < kRows && int(threadIdx.x) < rows.count)
    body = LatentNode(p, job.b + rows.b, job.n + (rows.first + threadIdx.x) / p.H).body();
  int most = __reduce_max_sync(~0u, body);
  if (lane == 0 && threadIdx.x < kRows) s.sum[0][threadIdx.x / kWarp] = __int_as_float(most);
  __syncthreads();  // the most of two warps is there, and barriers
  most = max(__float_as_int(s.sum[0][0]), __float_as_int(s.sum[0][1]));
  if (threadIdx.x < kRows) s.less[threadIdx.x] = min(most - body, 255);
  __syncthreads();  // rows are there
  cluster_wait();
  if (most == 0 || part_of_round(0, splits_of(most)) < 0) {
    Barrier::wait(shared_address(&s.q_full), 0);  // nothing may come later
  } else {
    if (threadIdx.x < kGroup) {
      SpreadScorer{.job = job, .s = s, .rank = rank, .rows = rows.count, .most = most}
          .score_rounds();
    } else {
      SpreadAdder adder{.job = job, .s = s, .rank = rank, .rows = rows.count};
      if (fills) filler.begin_walk(most), filler.fill();
      adder.add_rounds(rows, [&](int round) {
        if (fills) filler.refill(round);
      });
    }
  }
  __syncwarp();
  cluster_arrive(), cluster_wait();  // none is told anything any more
}

}  // namespace

// Where all splits find room at once: clusters of 4 on all processors did not, on half of them did.
int latent_spread(const LatentTensors& t, Stream stream) {
  const int64_t x = int64_t{t.job.B} * ceil_div(t.job.rows(), kRows);
  if (3 * x * t.job.parts * kBlocks > 2 * processors()) return 0;
  launch(latent_spread_kernel,
         {.blocks = dim3(x * kBlocks, t.job.parts),
          .threads = kSpreadThreads,
          .smem = smem_up_to<int{sizeof(SpreadSmem)}, kSmemSm90>(),
          .cluster = kBlocks,
          .early = true},
         stream, t);
  return static_cast<int>(x) * t.job.parts * kBlocks;
}

}  // namespace kdtree::cuda
