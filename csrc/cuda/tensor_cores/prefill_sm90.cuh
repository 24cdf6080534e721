// The warpgroups of prefill_sm90.cu: what shared memory holds, and what a thread of theirs does.
#pragma once

#include "barrier.cuh"
#include "prefill.cuh"
#include "prefill_wgmma.cuh"

namespace kdtree::cuda::prefill_sm90_parts {

using Bf16 = __nv_bfloat16;

inline constexpr int kGroup = 128, kGroups = 2, kRows = 64;  // threads; warpgroups; rows of each
inline constexpr int kReaders = kGroups * kGroup, kThreads = kReaders + kGroup;
inline constexpr int kStages = 2;
inline constexpr int kBoxWidth = 64, kLine = 128;  // features and bytes of a row of a box
inline constexpr int kBox = kPrefillTile * kLine, kQueryBox = kRows * kLine;
inline constexpr int kNopeBoxes = kPrefillNope / kBoxWidth, kValueBoxes = kPrefillValue / kBoxWidth;
inline constexpr int kKeyBoxes = kNopeBoxes + 1;
inline constexpr float kLog2E = 1.442695041f;
static_assert(kPrefillRope == kBoxWidth && kPrefillTile == 128 && kPrefillValue == 128);

struct Smem {
  char q[kGroups][kKeyBoxes * kQueryBox];
  char keys[kStages][kKeyBoxes * kBox], values[kStages][kValueBoxes * kBox];
  char key_ring[Ring<kStages>::kBytes], value_ring[Ring<kStages>::kBytes];
};

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline uint32_t packed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// x, which is never negative, is made before what waits next: a store that never happens needs it.
// Without, ptxas moves the wait before the exponentials.
__device__ inline void made_before(float x, uint32_t anywhere) {
  asm volatile(
      "{ .reg .pred never; setp.lt.f32 never, %0, 0f00000000;"
      "@never st.shared.f32 [%1], %0; }" ::"f"(x),
      "r"(anywhere)
      : "memory");
}

// Where a feature of a row stands among a warpgroup's queries, swizzled as tensor_copy would.
__device__ inline Bf16* query_at(char* q, int row, int feature) {
  const int chunk = feature % kBoxWidth / 8;
  char* line = q + feature / kBoxWidth * kQueryBox + row * kLine;
  return reinterpret_cast<Bf16*>(line + (chunk ^ row % 8) * 16) + feature % 8;
}

// By a warpgroup: its 64 rows from `first` on, rotated; zeros beyond the last.
__device__ inline void load_queries(const MlaPrefillParams& p, int h, int first, char* q,
                                    int barrier) {
  constexpr int kWidth = kPrefillNope + kPrefillRope, kChunks = kWidth / 8;
  constexpr int kPairs = kPrefillRope / 2;
  const auto meet = [&] {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kGroup) : "memory");
  };
  const int thread = threadIdx.x % kGroup;
  for (int i = thread; i < kRows * kChunks; i += kGroup) {
    const int row = i / kChunks, chunk = i % kChunks, n = first + row;
    const Bf16* from = static_cast<const Bf16*>(p.q) + n * p.q_row + h * kWidth + chunk * 8;
    const int4 v = n < p.N ? *reinterpret_cast<const int4*>(from) : int4{0, 0, 0, 0};
    *reinterpret_cast<int4*>(query_at(q, row, chunk * 8)) = v;
  }
  meet();  // what is to be rotated is there
  for (int i = thread; i < kRows * kPairs; i += kGroup) {
    const int row = i / kPairs, pair = i % kPairs;
    const int position = min(p.keys - p.N + first + row, p.positions - 1);
    const float* table = p.rope + int64_t{position} * kPrefillRope;
    const int low = kPrefillNope + (p.interleaved ? 2 * pair : pair);
    Bf16* x[] = {query_at(q, row, low), query_at(q, row, low + (p.interleaved ? 1 : kPairs))};
    const float a = float(*x[0]), b = float(*x[1]);
    const float cosine = table[pair], sine = table[kPairs + pair];
    *x[0] = Bf16(a * cosine - b * sine);
    *x[1] = Bf16(a * sine + b * cosine);
  }
  fence_products();  // products see the queries
  meet();
}

// A thread of a warpgroup: rows lane / 4 and 8 further of its warp's 16.
struct Reader {
  float sum[16][4] = {}, score[16][4];
  uint32_t weight[kPrefillTile / 16][4];  // of the tile before, as fragments
  float top[2] = {-INFINITY, -INFINITY}, mass[2] = {}, keep[2];
  float scale;
  int position;  // of the first row

  // score = q k, of a tile.
  __device__ void multiply_scores(uint32_t q, uint32_t keys) {
#pragma unroll
    for (int i = 0; i < kKeyBoxes; ++i)
#pragma unroll
      for (int k = 0; k < kLine; k += 32)
        wgmma_scores(score, wgmma_operand(q + i * kQueryBox + k),
                     wgmma_operand(keys + i * kBox + k), i + k > 0);
    wgmma_commit();
  }

  // sum += weight v, of a tile.
  __device__ void add_values(uint32_t values) {
#pragma unroll
    for (int k = 0; k < kPrefillTile / 16; ++k)
      wgmma_values(sum, weight[k], wgmma_transposed(values + k * 16 * kLine, kBox));
    wgmma_commit();
  }

  // Scores of the keys from `first` on become weights, in float32.
  __device__ void weigh(int first) {
    const int lane = threadIdx.x % kWarp;
    if (first + kPrefillTile > position - lane / 4 + 1) {  // the warp's first row sees not all
#pragma unroll
      for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (first + 8 * n + lane % 4 * 2 + i % 2 > position + i / 2 * 8) score[n][i] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = top[r];
#pragma unroll
      for (int n = 0; n < 16; ++n)
        largest = fmaxf(largest, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      keep[r] = exp2_of((top[r] - largest) * scale);
      top[r] = largest;
      const float base = largest * scale;
      float even = 0, odd = 0;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        float &low = score[n][2 * r], &high = score[n][2 * r + 1];
        low = exp2_of(fmaf(low, scale, -base)), high = exp2_of(fmaf(high, scale, -base));
        even += low, odd += high;
      }
      mass[r] = fmaf(mass[r], keep[r], even + odd);
    }
  }

  // Once the values of the tile before have been added: their factor, and the new weights.
  __device__ void turn() {
    if (__any_sync(~0u, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
      for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][i] *= keep[i / 2];
    }
#pragma unroll
    for (int k = 0; k < kPrefillTile / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weight[k][i] = packed(score[2 * k + i / 2][i % 2 * 2], score[2 * k + i / 2][i % 2 * 2 + 1]);
  }

  // The weights have been read.
  __device__ void weights_done() {
#pragma unroll
    for (int k = 0; k < kPrefillTile / 16; ++k)
      asm volatile("" ::"r"(weight[k][0]), "r"(weight[k][1]), "r"(weight[k][2]), "r"(weight[k][3]));
  }

  __device__ void read(const Smem& s, uint32_t q, int tiles, Ring<kStages> keys,
                       Ring<kStages> values) {
    const bool tells = threadIdx.x % kWarp == 0;
    const auto key = [&] { return shared_address(s.keys[keys.slot]); };
    const auto value = [&] { return shared_address(s.values[values.slot]); };
    keys.wait_full();
    wgmma_begin();
    multiply_scores(q, key());
    wgmma_wait<0>();
    wgmma_done(score);
    if (tells) Barrier::arrive(keys.empty());
    keys.next();
    weigh(0);
    turn();
#pragma unroll 1
    for (int tile = 1; tile < tiles; ++tile) {
      keys.wait_full(), values.wait_full();
      wgmma_begin();
      multiply_scores(q, key());
      add_values(value());
      wgmma_wait<1>();
      wgmma_done(score);
      if (tells) Barrier::arrive(keys.empty());
      weigh(tile * kPrefillTile);
      made_before(mass[0] + mass[1], q);
      wgmma_wait<0>();
      wgmma_done(sum);
      weights_done();
      if (tells) Barrier::arrive(values.empty());
      turn();
      keys.next(), values.next();
    }
    values.wait_full();
    wgmma_begin();
    add_values(value());
    wgmma_wait<0>();
    wgmma_done(sum);
    weights_done();
  }

  __device__ void write(const MlaPrefillParams& p, int h, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all = mass[r];
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      const float mean = 1 / all;
      const int n = row + 8 * r;
      if (n >= p.N) continue;
      Bf16* to = static_cast<Bf16*>(p.out) + (int64_t{n} * p.H + h) * kPrefillValue;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        *reinterpret_cast<uint32_t*>(to + 8 * i + threadIdx.x % 4 * 2) =
            packed(sum[i][2 * r] * mean, sum[i][2 * r + 1] * mean);
    }
  }
};

}  // namespace kdtree::cuda::prefill_sm90_parts
