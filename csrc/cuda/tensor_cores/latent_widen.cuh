// Tiles of FP8 latents, widened to bf16 by a warpgroup on their way to shared memory, where they stand as
// the copy engine would leave them.
#pragma once

#include "../fp8.cuh"
#include "latent_sm90.cuh"

namespace kdtree::cuda::latent_sm90_parts {

inline constexpr int kOwnRows = kTileKeys / kGroupWarps;  // of a tile, by a warp
inline constexpr int kHeldRows = 4;                       // that a warp has on their way at once, twice
static_assert(kLatent == 16 * kWarp && kRope == 64);

// To a row of a tile: eight features.
__device__ inline void put_chunk(char* tile, int row, int chunk, uint4 v) {
  *reinterpret_cast<uint4*>(tile + chunk / 8 * kBox + row * 128 + ((chunk ^ row) % 8) * 16) = v;
}

// Some rows' codes, 16 of each a lane.
struct HeldCodes {
  uint4 codes[kHeldRows];

  __device__ void load(const uint8_t* rows, int bytes) {
#pragma unroll
    for (int i = 0; i < kHeldRows; ++i)
      codes[i] = reinterpret_cast<const uint4*>(rows + i * bytes)[threadIdx.x % kWarp];
  }
  // scales: of the warp's rows, a lane each. Of eight lanes four begin with their second eight features:
  // all banks at once.
  __device__ void put(char* tile, int row, float scales) const {
    const int lane = threadIdx.x % kWarp;
    const bool second = lane & 4;
#pragma unroll
    for (int i = 0; i < kHeldRows; ++i) {
      const float scale = __shfl_sync(~0u, scales, (row + i) % kOwnRows);
      const uint4 low = widen_eight({codes[i].x, codes[i].y}, scale);
      const uint4 high = widen_eight({codes[i].z, codes[i].w}, scale);
      put_chunk(tile, row + i, 2 * lane + second, second ? high : low);
      put_chunk(tile, row + i, 2 * lane + !second, second ? low : high);
    }
  }
};

// Some rows' rope parts, eight lanes a row.
struct HeldRope {
  static constexpr int kAtOnce = kWarp / 8;
  uint4 part[kOwnRows / kAtOnce];

  __device__ void load(const uint8_t* rows, int bytes) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kOwnRows / kAtOnce; ++i) {
      const uint8_t* row = rows + (lane / 8 + i * kAtOnce) * bytes;
      part[i] = reinterpret_cast<const uint4*>(rope_of(row, kLatent))[lane % 8];
    }
  }
  __device__ void put(char* tile, int row) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kOwnRows / kAtOnce; ++i)
      put_chunk(tile, row + lane / 8 + i * kAtOnce, kLatent / 8 + lane % 8, part[i]);
  }
};

// By all threads of a warpgroup: a page to a place once that is empty. Loads are on their way while the
// rows before are widened.
__device__ inline void widen_tile(const MlaAttentionParams& p, Smem& s, const Place& place, int page) {
  const int row = threadIdx.x % kGroup / kWarp * kOwnRows;
  const uint8_t* rows =
      static_cast<const uint8_t*>(p.cache) + (int64_t{page} * kPage + row) * p.fp8_bytes;
  char* tile = s.keys[place.i];
  HeldCodes even, odd;
  HeldRope rope;
  const float scales = *scale_of(rows + threadIdx.x % kOwnRows * p.fp8_bytes, kLatent);
  even.load(rows, p.fp8_bytes);
  odd.load(rows + kHeldRows * p.fp8_bytes, p.fp8_bytes);
  Barrier::wait(place.empty(), place.parity ^ 1);
  even.put(tile, row, scales);
  even.load(rows + 2 * kHeldRows * p.fp8_bytes, p.fp8_bytes);
  odd.put(tile, row + kHeldRows, scales);
  odd.load(rows + 3 * kHeldRows * p.fp8_bytes, p.fp8_bytes);
  even.put(tile, row + 2 * kHeldRows, scales);
  rope.load(rows, p.fp8_bytes);
  odd.put(tile, row + 3 * kHeldRows, scales);
  rope.put(tile, row);
  static_assert(kOwnRows == 4 * kHeldRows);
  fence_products();
  __syncwarp();
  if (threadIdx.x % kWarp == 0) Barrier::arrive(place.full());
}

// A page to the second-level cache.
__device__ inline void fetch_page(const MlaAttentionParams& p, int page) {
  const int bytes = kPage * p.fp8_bytes;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                   static_cast<const uint8_t*>(p.cache) + int64_t{page} * bytes),
               "r"(bytes)
               : "memory");
}

}  // namespace kdtree::cuda::latent_sm90_parts
