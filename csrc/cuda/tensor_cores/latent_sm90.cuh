// The warpgroups of latent_sm90.cu: how they take turns, and what a thread of theirs does.
#pragma once

#include "latent_scores.cuh"

namespace kdtree::cuda::latent_sm90_parts {

inline constexpr int kReaders = 2 * kGroup, kThreads = kReaders + kGroup;
inline constexpr int kColumns = kLatent / 2;  // of a warpgroup
inline constexpr int kWeights = kLatent / kBoxWidth * kBox;  // of a tile: where its weights come to stand

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

// Its phase ends when so many have arrived.
__device__ inline void barrier_init_for(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

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
};

// A thread of warpgroup kOwn: rows g and g + 8 of its warp's 16, 256 features of their sums.
template <int kOwn>
struct Reader {
  const LatentJob& job;
  Smem& s;
  Place places[2];
  int row, lane;
  float scale;
  float sums[kColumns / 8][4], score[8][4], top[2], sum[2];

  __device__ void wait_full(Place& place) { barrier_wait(place.full(), place.parity); }
  __device__ void leave(Place& place) {  // once its latents have been added
    wgmma_wait<0>();
    wgmma_done(sums);
    if (lane == 0) Ring<1>::arrive(place.empty());
    place.parity ^= 1;
  }

  // The scores of the own tile, of which `count` positions are there: the rest is zeros from now on.
  __device__ void score_tile(int count) {
    Place& place = places[kOwn];
    wait_full(place);
    if (count < kTileKeys) {
      constexpr int kChunksOfRow = kLatent / 8;
      for (int i = threadIdx.x % kGroup; i < (kTileKeys - count) * kChunksOfRow; i += kGroup) {
        const int key = count + i / kChunksOfRow, chunk = i % kChunksOfRow;
        char* to = s.keys[kOwn] + chunk / 8 * kBox + key * 128 + chunk % 8 * 16;
        *reinterpret_cast<int4*>(to) = {0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] = 0;
    const uint32_t keys = place.at(), q = shared_address(s.q);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kBoxes; ++i)
#pragma unroll
      for (int k = 0; k < 128; k += 32)
        wgmma(score, wgmma_operand(q + i * kBox + k), wgmma_operand(keys + i * kBox + k));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(score);
  }

  // Scores become weights where both warpgroups read them; tells the other. seen: of the tile's
  // positions, by row
  __device__ void weigh_tile(const int (&seen)[2], float (&keep)[2]) {
    Weighed& w = s.weighed[kOwn];
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

  // Two tiles from `at` on, the second one perhaps beyond the end.
  __device__ void add_two(int at, int end, const int (&body)[2]) {
    float keep[2];
    const int next = at + kTileKeys;
    const bool two = next < end;
    if constexpr (kOwn == 0) {
      score_tile(end - at);
      weigh_tile({body[0] - at, body[1] - at}, keep);
      add_tile(0, keep);
      if (two) hear(keep);
      leave(places[0]);
      if (!two) return;
      wait_full(places[1]);
      add_tile(1, keep);
    } else {
      if (two) score_tile(end - next);
      hear(keep);
      wait_full(places[0]);
      add_tile(0, keep);
      if (two) weigh_tile({body[0] - next, body[1] - next}, keep);
      leave(places[0]);
      if (!two) return;
      add_tile(1, keep);
    }
    leave(places[1]);
  }

  __device__ void add_split(int b, int first, int rows, int part, int most) {
    const int end = min(split_begin(part + 1), most), body[] = {s.body[row], s.body[row + 8]};
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0;
    top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0;
    for (int at = split_begin(part); at < end; at += 2 * kTileKeys) add_two(at, end, body);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = row + 8 * r;
      Bf16* to = part_of(job, b, first + min(own, rows - 1), part) + kOwn * kColumns;
      store_part(sums, r, to, own < rows);
      if (kOwn == 0 && lane % 4 == 0 && own < rows)
        *stats_of(job, b, first + own, part) = {top[r], sum[r]};
    }
  }

  __device__ void add_splits(int b, int first, int rows, int most) {
    barrier_wait(shared_address(&s.q_full), 0);
    const int splits = splits_of(most);
    for (int round = 0; round * static_cast<int>(gridDim.y) < splits; ++round)
      if (const int part = part_of_round(round, splits); part >= 0)
        add_split(b, first, rows, part, most);
  }
};

}  // namespace kdtree::cuda::latent_sm90_parts
