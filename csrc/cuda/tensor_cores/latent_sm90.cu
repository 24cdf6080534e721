// mla_attention's splits for latents of 512 + 64 features in bf16, by wgmma: see latent.cuh. For sm_90a.
//
// Grid    x = (sequence, 64 rows), y = splits, each block walking some of them. It depends on shapes
//         alone; blocks beyond a sequence's context end at once.
// Tiling  one thread commands the copies of tiles, two ahead. Two warpgroups score 32 of a tile's 64
//         positions each, tell each other the largest, write the weights where both read them, and
//         add 256 of the 512 features each: 128 registers of sums.
// Smem    q, two tiles, weights: 225 KB.
// Floor   2176 flops a row and position: 64 rows and 64 positions take 1.2 us of a processor's peak;
//         the latents' bytes once per 64 rows, from L2 but for the first.
// Needs   q and cache on 16 bytes; 4 heads, so that a tile's nodes are 15 apart at most.
#include "latent.cuh"
#include "latent_wgmma.cuh"
#include "tensor_map.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kRows = 64, kReaders = 256, kThreads = kReaders + 128, kStages = 2;
constexpr int kBoxWidth = 64, kBox = 64 * 128;     // features of a box; bytes of 64 rows of it
constexpr int kBoxes = kWidth / kBoxWidth, kTileBytes = kBoxes * kBox;
constexpr int kColumns = kLatent / 2;              // of a warpgroup
constexpr int kOwnKeys = kTileKeys / 2;

struct Smem {
  char keys[kStages][kTileBytes], q[kTileBytes], weight[kBox];
  float top[2][kRows], sum[2][kRows];  // of the halves of a tile
  int body[kRows];
  uint64_t ring[2 * kStages], q_full;
};

struct LatentTensors {
  CUtensorMap q, cache;
  LatentJob job;
};

__device__ inline void readers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kReaders) : "memory");
}
// What was written to shared memory is seen by products.
__device__ inline void products_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// By one thread: q once, and the tiles of all splits of the block.
__device__ inline void fill_tiles(const LatentTensors& t, const Smem& s, Ring<kStages> ring, int b,
                                  int first, int most) {
  const LatentJob& job = t.job;
  const MlaAttentionParams& p = job.p;
  const int32_t* table = p.block_table + int64_t{job.b + b} * p.max_pages;
  const uint32_t keys = shared_address(s.keys), q = shared_address(s.q);
  const int row = ((job.b + b) * p.N + job.n) * p.H + first, splits = splits_of(most);
  barrier_expect(shared_address(&s.q_full), kTileBytes);
  for (int i = 0; i < kBoxes; ++i)
    tensor_copy(q + i * kBox, t.q, i * kBoxWidth, row, 0, shared_address(&s.q_full));
  for (int round = 0; round * static_cast<int>(gridDim.y) < splits; ++round) {
    const int part = part_of_round(round, splits);
    if (part < 0) continue;
    const int end = min(split_begin(part + 1), most);
    for (int at = split_begin(part); at < end; at += kTileKeys, ring.next()) {
      const int page = table[at / kPage];
      ring.wait_empty();
      ring.expect(kTileBytes);
      for (int i = 0; i < kBoxes; ++i)
        tensor_copy(keys + ring.slot * kTileBytes + i * kBox, t.cache, i * kBoxWidth, 0, page,
                    ring.full());
    }
  }
}

// A thread of the warpgroups: rows g and g + 8 of its warp's 16, 256 features of their sums.
struct Reader {
  const LatentJob& job;
  Smem& s;
  Ring<kStages> ring;
  int half, row, lane;  // of the tile and of the features; its first row
  float scale;
  float sums[kColumns / 8][4], top[2], sum[2];

  __device__ void score(float (&score)[4][4]) const {
    const uint32_t keys = shared_address(s.keys[ring.slot]) + half * kOwnKeys * 128;
    const uint32_t q = shared_address(s.q);
    clear_scores(score);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kBoxes; ++i)
#pragma unroll
      for (int k = 0; k < 128; k += 32)
        wgmma(score, wgmma_operand(q + i * kBox + k), wgmma_operand(keys + i * kBox + k));
    wgmma_commit();
  }
  static __device__ void clear_scores(float (&score)[4][4]) {
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[b][i] = 0;
  }

  // The positions from `count` on, which nobody wrote, as zeros: nothing of theirs may be added.
  __device__ void clear_tail(int count) const {
    for (int i = threadIdx.x; i < (kTileKeys - count) * kLatent / 8; i += kReaders) {
      const int key = count + i / (kLatent / 8), chunk = i % (kLatent / 8);
      char* to = s.keys[ring.slot] + chunk / 8 * kBox + key * 128 + chunk % 8 * 16;
      *reinterpret_cast<int4*>(to) = {0, 0, 0, 0};
    }
    products_fence();
  }

  // Scores become weights, in place; tops and sums of weights go on. keep: of the sums so far
  __device__ void weigh(float (&score)[4][4], const int (&seen)[2], float (&keep)[2]) {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = half * kOwnKeys + 8 * b + lane % 4 * 2 + i % 2;
        score[b][i] = key < seen[i / 2] ? score[b][i] * scale : -INFINITY;
        largest[i / 2] = fmaxf(largest[i / 2], score[b][i]);
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
      if (lane % 4 == 0) s.top[half][row + 8 * r] = largest[r];
    }
    readers_sync();  // both halves' tops are there, and nobody reads the weights before
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float both = fmaxf(s.top[0][row + 8 * r], s.top[1][row + 8 * r]);
      const float next = fmaxf(both, top[r]), base = base_of(next);
      keep[r] = exp2_of(top[r] - base);
      top[r] = next;
      float added[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        float &low = score[b][2 * r], &high = score[b][2 * r + 1];
        low = exp2_of(low - base), high = exp2_of(high - base);
        added[b] = low + high;
      }
      float all = (added[0] + added[1]) + (added[2] + added[3]);
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      if (lane % 4 == 0) s.sum[half][row + 8 * r] = all;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int chunk = half * 4 + b, at = row + 8 * r;
        char* to = s.weight + at * 128 + (chunk ^ at % 8) * 16 + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(to) = pack(score[b][2 * r], score[b][2 * r + 1]);
      }
    }
    products_fence();
    readers_sync();  // all weights are there
#pragma unroll
    for (int r = 0; r < 2; ++r)
      sum[r] = fmaf(sum[r], keep[r], s.sum[0][row + 8 * r] + s.sum[1][row + 8 * r]);
  }

  __device__ void add(const float (&keep)[2]) {
    if (__any_sync(~0u, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] *= keep[i / 2];
    }
    const uint32_t keys = shared_address(s.keys[ring.slot]) + half * (kColumns / kBoxWidth) * kBox;
    const uint32_t weight = shared_address(s.weight);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k)
      wgmma_latents(sums, wgmma_operand(weight + 32 * k), wgmma_transposed(keys + 2048 * k, kBox));
    wgmma_commit();
  }

  __device__ void store(int b, int first, int rows, int part) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row + 8 * r;
      Bf16* to = part_of(job, b, first + min(at, rows - 1), part) + half * kColumns;
      store_part(sums, r, sum[r], to, at < rows);
      if (half == 0 && lane % 4 == 0 && at < rows)
        *stats_of(job, b, first + at, part) = {top[r], sum[r]};
    }
  }

  __device__ void split(int part, int most) {
    const int end = min(split_begin(part + 1), most), body[] = {s.body[row], s.body[row + 8]};
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0;
    top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0;
    for (int at = split_begin(part); at < end; at += kTileKeys, ring.next()) {
      float weights[4][4], keep[2];
      ring.wait_full();
      if (end - at < kTileKeys) clear_tail(end - at);
      score(weights);
      wgmma_wait<0>();
      wgmma_done(weights);
      weigh(weights, {body[0] - at, body[1] - at}, keep);
      add(keep);
      wgmma_wait<0>();
      wgmma_done(sums);
      if (lane == 0) ring.arrive(ring.empty());
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    latent_sm90_kernel(const __grid_constant__ LatentTensors t) {
  extern __shared__ __align__(1024) char bytes[];
  Smem& s = *reinterpret_cast<Smem*>(bytes);
  let_next_begin();
  const LatentJob& job = t.job;
  const MlaAttentionParams& p = job.p;
  const int tiles = ceil_div(job.rows(), kRows), b = blockIdx.x / tiles;
  const int first = blockIdx.x % tiles * kRows, rows = min(kRows, job.rows() - first);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Ring<kStages> ring{shared_address(s.ring)};
  if (threadIdx.x < kRows) {
    const int r = threadIdx.x;
    s.body[r] = r < rows ? LatentNode(p, job.b + b, job.n + (first + r) / p.H).body() : 0;
  }
  if (threadIdx.x == kReaders) {
    barrier_init(shared_address(&s.q_full));
    ring.init(kReaders / kWarp);
  }
  __syncthreads();  // bodies and barriers are there
  const int most = __reduce_max_sync(~0u, max(s.body[lane], s.body[lane + 32]));
  if (most == 0) return;
  if (threadIdx.x >= kReaders) {
    give_registers<40>();
    if (threadIdx.x == kReaders) fill_tiles(t, s, ring, b, first, most);
    return;
  }
  take_registers<232>();
  Reader reader{.job = job, .s = s, .ring = ring};
  reader.half = warp / 4, reader.row = warp % 4 * 16 + lane / 4, reader.lane = lane;
  reader.scale = p.scale * kLog2E;
  barrier_wait(shared_address(&s.q_full), 0);
  const int splits = splits_of(most);
  for (int round = 0; round * static_cast<int>(gridDim.y) < splits; ++round) {
    const int part = part_of_round(round, splits);
    if (part < 0) continue;
    reader.split(part, most);
    reader.store(b, first, rows, part);
  }
}

}  // namespace

bool latent_sm90(const LatentJob& job, Stream stream) {
  const MlaAttentionParams& p = job.p;
  if (!job.aligned || p.H < 4) return false;
  LatentTensors t{.job = job};
  const uint64_t width = kWidth, line = 2 * kWidth, all = uint64_t(p.B) * p.N * p.H;
  const Boxes q{.at = p.q, .sizes = {width, all, 1}, .strides = {line, line * all},
                .box = {kBoxWidth, kRows, 1}, .swizzle = CU_TENSOR_MAP_SWIZZLE_128B};
  // The copy engine checks pages against no end: the table names those that are there.
  const Boxes cache{.at = p.cache, .sizes = {width, kPage, uint64_t{1} << 31},
                    .strides = {line, line * kPage}, .box = {kBoxWidth, kPage, 1},
                    .swizzle = CU_TENSOR_MAP_SWIZZLE_128B};
  if (!describe(t.q, q) || !describe(t.cache, cache)) return false;
  const int x = job.B * ceil_div(job.rows(), kRows);
  const int y = std::min(std::max(processors() / x, 1), job.parts);
  launch(latent_sm90_kernel,
         {dim3(x, y), kThreads, smem_up_to<int{sizeof(Smem)}, kSmemSm90>()}, stream, t);
  return true;
}

}  // namespace kdtree::cuda
