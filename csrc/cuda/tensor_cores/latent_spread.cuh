// The warpgroups of latent_spread.cu: what blocks of a cluster tell each other, and what a thread of
// each group does.
#pragma once

#include "latent_scores.cuh"

namespace kdtree::cuda::latent_sm90_parts {

// A cluster: each block scores one tile of a round, and adds kSlice features of all.
inline constexpr int kBlocks = 4, kSlice = kLatent / kBlocks, kSliceBoxes = kSlice / kBoxWidth;
inline constexpr int kSpreadThreads = 2 * kGroup;

// Of a round: where its first tile begins, how many there are, how many positions the last one has;
// the split's part if it ends it, else -1; whether it is the cluster's last.
struct Round {
  int at, tiles, rest, part, last;
};

struct SpreadSmem {
  char own[kTileBytes];                             // latents that are scored here
  char others[kBlocks - 1][kSliceBoxes * kBox];     // the slice of those of other blocks
  char weights[kBlocks][kBox], spare[kTileBytes - kBlocks * kBox];  // of each tile; first the queries
  float top[2][kBlocks][kRows];                     // of each tile, by turns
  float sum[kBlocks][kRows];                        // of its weights, in the first block
  uint8_t less[kRows];  // positions that a row attends to less than the most of all rows
  Round round;
  Walk walk;
  // Arrivals: weighed 1 and bytes, of another block's tile; done all adding warps of the cluster, once
  // for a round; tops 1 and bytes, of even and odd rounds; full 1 and bytes.
  uint64_t full[kShares], others_full, weighed[kBlocks], tops[2], q_full, done;

  // The share of the block's tile is there, or what is said of the round where it has none.
  __device__ void wait_full(int share, int round) const {
    Barrier::wait(shared_address(&full[share]), round % 2);
  }
  __device__ static int other(int tile, int rank) { return tile - (tile > rank); }
};

// So many bytes to where they stand here in block `rank`.
__device__ inline void send_bytes(const char* from, int bytes, const uint64_t& barrier, int rank) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(there(shared_address(from), rank)),
      "r"(shared_address(from)), "r"(bytes), "r"(there(shared_address(&barrier), rank))
      : "memory");
}

// The block's own tile is weighed: its scoring warpgroup tells the adding one.
__device__ inline void tell_own() {
  asm volatile("bar.arrive 3, %0;" ::"n"(kSpreadThreads) : "memory");
}
__device__ inline void wait_own() {
  asm volatile("bar.sync 3, %0;" ::"n"(kSpreadThreads) : "memory");
}

// The rows of weights that go to other blocks.
__device__ inline int weight_bytes(int rows) { return ceil_div(rows, 8) * 8 * 128; }

// The warpgroup that scores the block's tile of each round and weighs it.
struct SpreadScorer {
  const LatentJob& job;
  SpreadSmem& s;
  int rank, rows, most;
  Scores scores;
  float top[2];

  __device__ void load_queries() {
    Barrier::wait(shared_address(&s.q_full), 0);
#pragma unroll
    for (int i = 0; i < Scores::kSteps; ++i)
      scores.load_query(shared_address(s.weights[0]), i, scores.q[i]);
    group_sync<1>();  // all warps have them: weights may stand there
  }

  // The largest scores of this thread's rows to all blocks. A block without a tile tells them, too:
  // from then on weights may be sent to where its queries were.
  __device__ void tell(int turn, const float (&largest)[2]) {
    const int row = row_now();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& to = s.top[turn][rank][row + 8 * r];
      for (int block = threadIdx.x % 4; block < kBlocks; block += 4)
        if (block == rank)
          to = largest[r];
        else
          store_async(&to, &s.tops[turn], block, largest[r]);
    }
    __syncwarp();
  }

  // Scores of the own tile, in round i; their largest to all blocks.
  __device__ void score_tile(int i, const Round& round) {
    const int count = rank == round.tiles - 1 ? round.rest : kTileKeys;
    if (count < kTileKeys) {
      for (int share = 0; share < kShares; ++share) s.wait_full(share, i);
      clear_rest(s.own, kLatent / kBoxWidth, count);
    }
    scores.multiply(shared_address(s.own), [&](int share) { s.wait_full(share, i); });
    const int row = row_now(), here = most - round.at - rank * kTileKeys;
    scores.scale_and_cut(job.p.scale * kLog2E, {here - s.less[row], here - s.less[row + 8]});
    tell(i % 2, {scores.largest(0, -INFINITY), scores.largest(1, -INFINITY)});
  }

  // The largest score of a row up to this block's tile; top: up to the last one from now on.
  __device__ float largest_here(int turn, int tiles, int r) {
    float here = top[r];
    for (int t = 0; t < tiles; ++t) {
      top[r] = fmaxf(top[r], s.top[turn][t][row_now() + 8 * r]);
      if (t == rank) here = top[r];
    }
    return here;
  }

  __device__ void send_weights() {
    fence_products();
    tell_own();
    group_sync<1>();  // all of them are there
    const int block = threadIdx.x;
    if (block < kBlocks && block != rank)
      send_bytes(s.weights[rank], weight_bytes(rows), s.weighed[rank], block);
  }

  __device__ void score_rounds() {
    load_queries();
    top[0] = top[1] = -INFINITY;
    for (int i = 0;; ++i) {
      const int turn = i % 2;
      s.wait_full(0, i);
      const Round round = s.round;
      const bool own = rank < round.tiles;
      // The adders have all that was sent before.
      const auto wait_done = [&] {
        if (i > 0) Barrier::wait_for_cluster(shared_address(&s.done), (i - 1) % 2);
      };
      if (!own) wait_done();
      if (threadIdx.x == 0)
        Barrier::expect(shared_address(&s.tops[turn]), (kBlocks - 1) * kRows * 4);
      if (own)
        score_tile(i, round);
      else
        tell(turn, {-INFINITY, -INFINITY});
      Barrier::wait_for_cluster(shared_address(&s.tops[turn]), i / 2 % 2);
      const float here[] = {largest_here(turn, round.tiles, 0), largest_here(turn, round.tiles, 1)};
      if (own) {
        wait_done();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float all =
              scores.weigh(r, base_of(here[r]), shared_address(s.weights[rank]));
          float& to = s.sum[rank][row_now() + 8 * r];
          if (threadIdx.x % 4 != 0) continue;
          if (rank == 0)
            to = all;
          else
            store_async(&to, &s.weighed[rank], 0, all);
        }
        send_weights();
      }
      if (round.part >= 0) top[0] = top[1] = -INFINITY;
      if (round.last) return;
    }
  }
};

// The warpgroup that adds kSlice features of the latents of all tiles.
struct SpreadAdder {
  const LatentJob& job;
  SpreadSmem& s;
  int rank, rows;
  float sums[kSlice / 8][4], top[2], sum[2];

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kSlice / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0;
    top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0;
  }

  // Until the tile's weights have come. Those who wait say how many bytes will.
  __device__ void wait_weights(int tile, uint32_t parity) {
    if (tile == rank) return wait_own();
    const uint32_t barrier = shared_address(&s.weighed[tile]);
    if (threadIdx.x == kGroup)
      Barrier::expect(barrier, weight_bytes(rows) + (rank == 0 ? kRows * 4 : 0));
    Barrier::wait_for_cluster(barrier, parity);
  }

  __device__ void add_tile(int tile, char* keys, const float (&largest)[2]) {
    float keep[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float now = fmaxf(top[r], largest[r]);
      keep[r] = exp2_of(top[r] - base_of(now));
      top[r] = now;
      if (rank == 0) sum[r] = fmaf(sum[r], keep[r], s.sum[tile][row_now() + 8 * r]);
    }
    if (__any_sync(~0u, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
      for (int n = 0; n < kSlice / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] *= keep[i / 2];
    }
    const uint32_t weights = shared_address(s.weights[tile]), at = shared_address(keys);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k)
      wgmma_latents(sums, wgmma_operand(weights + 32 * k), wgmma_transposed(at + 2048 * k, kBox));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(sums);
  }

  __device__ void store(const Rows& all, int part) {
    const int row = row_now();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = row + 8 * r;
      Bf16* to = part_of(job, all.b, all.first + min(own, rows - 1), part);
      store_part(sums, r, to + rank * kSlice, own < rows);
      if (rank == 0 && threadIdx.x % 4 == 0 && own < rows)
        *stats_of(job, all.b, all.first + own, part) = {top[r], sum[r]};
    }
  }

  // refill(round): by the warp that commands the copies
  template <class Refill>
  __device__ void add_rounds(const Rows& all, Refill refill) {
    clear();
    uint32_t parities = 0;  // of the tiles' weights
    for (int i = 0;; ++i) {
      const int turn = i % 2;
      for (int share = 0; share < kShares; ++share) s.wait_full(share, i);
      const Round round = s.round;
      Barrier::wait_for_cluster(shared_address(&s.tops[turn]), i / 2 % 2);
      for (int t = 0; t < round.tiles; ++t) {
        const int row = row_now();
        wait_weights(t, parities >> t & 1);
        parities ^= 1 << t;
        const float largest[] = {s.top[turn][t][row], s.top[turn][t][row + 8]};
        char* keys = t == rank ? s.own + rank * kSliceBoxes * kBox
                               : s.others[SpreadSmem::other(t, rank)];
        if (t != rank) {
          Barrier::wait(shared_address(&s.others_full), i % 2);
          if (t == round.tiles - 1 && round.rest < kTileKeys) {
            clear_rest(keys, kSliceBoxes, round.rest);
            fence_products();
            group_sync<2>();
          }
        }
        add_tile(t, keys, largest);
      }
      __syncwarp();
      if (threadIdx.x % kWarp < kBlocks)
        Barrier::arrive_in(threadIdx.x % kWarp, shared_address(&s.done));
      if (!round.last) refill(i);
      if (round.part >= 0) store(all, round.part), clear();
      if (round.last) return;
    }
  }
};

}  // namespace kdtree::cuda::latent_sm90_parts
