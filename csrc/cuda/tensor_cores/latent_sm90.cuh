// The warpgroups of latent_sm90.cu: how they take turns, and what a thread of theirs does.
#pragma once

#include "latent_scores.cuh"

namespace kdtree::cuda::latent_sm90_parts {

inline constexpr int kReaders = 2 * kGroup, kThreads = kReaders + kGroup;
inline constexpr int kColumns = kLatent / 2;  // of a warpgroup
inline constexpr int kWeights = kLatent / kBoxWidth * kBox;  // of a tile: where its weights come to stand
inline constexpr int kTwoTiles = 2 * kTileKeys;

// What a warpgroup tells the other of the tile that it weighed, of each row.
struct Weighed {
  float keep[kRows], top[kRows], sum[kRows];
};

struct Smem {
  char keys[2][kTileBytes], q[kTileBytes];
  Weighed weighed[2];
  int body[kRows];
  uint64_t full[2], empty[2], q_full;
};

// Of the tile that the warpgroup `of` weighs: it tells when all its threads have, the other waits.
__device__ inline void tell_weighed(int of) {
  fence_products();  // they see the weights
  asm volatile("bar.arrive %0, %1;" ::"r"(of + 1), "n"(kReaders) : "memory");
  asm volatile("bar.sync %0, %1;" ::"r"(of + 3), "n"(kGroup) : "memory");
}
__device__ inline void wait_weighed(int of) {
  asm volatile("bar.sync %0, %1;" ::"r"(of + 1), "n"(kReaders) : "memory");
}

// A tile's place in shared memory and the turns of its barriers.
struct Place {
  const Smem& s;
  int i;
  uint32_t parity = 0;
  __device__ uint32_t full() const { return shared_address(&s.full[i]); }
  __device__ uint32_t empty() const { return shared_address(&s.empty[i]); }
  __device__ uint32_t at() const { return shared_address(s.keys[i]); }
  __device__ void wait_full() const { Barrier::wait(full(), parity); }
};

// A thread of warpgroup kOwn: rows g and g + 8 of its warp's 16, 256 features of their sums. kHeldSteps: so
// many steps of 16 features of the queries stand in its registers; products read the others from shared
// memory for every tile
template <int kOwn, int kHeldSteps>
struct Reader {
  const LatentJob& job;
  Smem& s;
  Place places[2];
  float sums[kColumns / 8][4], score[8][4], top[2], sum[2];
  uint32_t held[kHeldSteps + 1][4];

  __device__ void leave(Place& place) {  // once its latents have been added
    __syncwarp();  // all lanes have heard what the other warpgroup told of it
    if (thread_now() % kWarp == 0) Barrier::arrive(place.empty());
    place.parity ^= 1;
  }
  template <int kNT>
  __device__ void wait_products(float (&c)[kNT][4]) {
    wgmma_wait<0>();
    wgmma_done(c);
  }

  // The scores of the own tile, of which `count` positions are there: the rest is zeros from now on.
  __device__ void score_tile(int count) {
    const Place& place = places[kOwn];
    place.wait_full();
    if (count < kTileKeys) clear_rest(s.keys[kOwn], kLatent / kBoxWidth, count);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] = 0;
    const uint32_t keys = place.at(), q = shared_address(s.q);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < Scores::kSteps; ++i) {
      const uint32_t at = i / 4 * kBox + i % 4 * 32;
      if (i < kHeldSteps)
        wgmma_scores(score, held[i < kHeldSteps ? i : 0], wgmma_operand(keys + at));
      else
        wgmma(score, wgmma_operand(q + at), wgmma_operand(keys + at));
    }
    wgmma_commit();
    wait_products(score);
  }

  // Scores become weights where both warpgroups read them; tells the other. seen: of the tile's
  // positions, by row
  __device__ void weigh_tile(const int (&seen)[2], float (&keep)[2]) {
    Weighed& w = s.weighed[kOwn];
    const int row = row_now(), lane = thread_now() % kWarp;
    const float scale = job.p.scale * kLog2E;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] *= scale;
    if (__any_sync(~0u, min(seen[0], seen[1]) < kTileKeys)) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (8 * n + lane % 4 * 2 + i % 2 >= seen[i / 2]) score[n][i] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row + 8 * r;
      float largest = top[r];
#pragma unroll
      for (int n = 0; n < 8; ++n)
        largest = fmaxf(largest, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float base = base_of(largest);
      keep[r] = exp2_of(top[r] - base);
      top[r] = largest;
      float added[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float low = exp2_of(score[n][2 * r] - base), high = exp2_of(score[n][2 * r + 1] - base);
        added[n] = low + high;
        char* to = s.keys[kOwn] + kWeights + at * 128 + (n ^ at % 8) * 16 + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(to) = pack(low, high);
      }
      float all = ((added[0] + added[1]) + (added[2] + added[3])) +
                  ((added[4] + added[5]) + (added[6] + added[7]));
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      sum[r] = fmaf(sum[r], keep[r], all);
      if (lane % 4 == 0) w.keep[at] = keep[r], w.top[at] = top[r], w.sum[at] = all;
    }
    tell_weighed(kOwn);
  }

  // What the other warpgroup says of its tile.
  __device__ void hear(float (&keep)[2]) {
    wait_weighed(1 - kOwn);
    const Weighed& w = s.weighed[1 - kOwn];
    const int row = row_now();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      keep[r] = w.keep[row + 8 * r], top[r] = w.top[row + 8 * r];
      sum[r] = fmaf(sum[r], keep[r], w.sum[row + 8 * r]);
    }
  }

  // Begins to add a tile's latents.
  __device__ void add_tile(int tile, const float (&keep)[2]) {
    if (__any_sync(~0u, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] *= keep[i / 2];
    }
    const uint32_t at = places[tile].at(), keys = at + kOwn * (kColumns / kBoxWidth) * kBox;
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k)
      wgmma_latents(sums, wgmma_operand(at + kWeights + 32 * k),
                    wgmma_transposed(keys + 2048 * k, kBox));
    wgmma_commit();
  }

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0;
    top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0;
  }
  __device__ void store(const Rows& rows, int part) {
    const int row = row_now(), lane = thread_now() % kWarp;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = row + 8 * r;
      Bf16* to = part_of(job, rows.b, rows.first + min(own, rows.count - 1), part) + kOwn * kColumns;
      store_part(sums, r, to, own < rows.count);
      if (kOwn == 0 && lane % 4 == 0 && own < rows.count)
        *stats_of(job, rows.b, rows.first + own, part) = {top[r], sum[r]};
    }
  }
  // Of the tile at position `at`, so many positions are the thread's two rows' own.
  __device__ void weigh_at(int at, float (&keep)[2]) {
    const int row = row_now();
    weigh_tile({s.body[row] - at, s.body[row + 8] - at}, keep);
  }

  // Two tiles, the second one perhaps beyond the end.
  __device__ void add_two(const Walk& now) {
    float keep[2];
    const int second = now.at + kTileKeys;
    const bool two = second < now.end;
    if constexpr (kOwn == 0) {
      score_tile(now.end - now.at);
      weigh_at(now.at, keep);
      add_tile(0, keep);
      if (two) hear(keep);
      wait_products(sums);
      leave(places[0]);
      if (!two) return;
      places[1].wait_full();
      add_tile(1, keep);
    } else {
      if (two) score_tile(now.end - second);
      hear(keep);
      places[0].wait_full();
      add_tile(0, keep);
      if (two) weigh_at(second, keep);
      wait_products(sums);
      leave(places[0]);
      if (!two) return;
      add_tile(1, keep);
    }
    wait_products(sums);
    leave(places[1]);
  }

  __device__ void read(const Rows& rows, Walk walk) {
    Barrier::wait(shared_address(&s.q_full), 0);
#pragma unroll
    for (int i = 0; i < kHeldSteps; ++i) Scores::load_query(shared_address(s.q), i, held[i]);
    clear();
    while (walk.next(kTwoTiles)) {
      add_two(walk);
      if (walk.at + kTwoTiles >= walk.end) store(rows, walk.part), clear();
    }
  }
};

}  // namespace kdtree::cuda::latent_sm90_parts
