// mla_attention's splits for latents of 512 + 64 features in bf16, by mma.sync: see latent.cuh.
//
// Grid    x = (sequence, 16 rows), y = splits, each block walking some of them. It depends on shapes
//         alone; blocks beyond a sequence's context end at once.
// Tiling  8 warps. Scores: a warp has 8 positions of a tile x 16 rows; softmax: 16 threads a row;
//         weighted latents: a warp has 64 of the 512 features x 16 rows.
// Smem    q and the tiles in rows of 1168 bytes, scores, weights: 100 KB with one tile at a time, two
//         blocks an SM of sm_90.
// Floor   the latents' bytes: 1152 a position, once per 16 rows, from L2 but for the first.
// Needs   nothing of alignment; unaligned latents are copied element by element.
#include <algorithm>

#include "../mla_attention.cuh"
#include "latent.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kRows = 16, kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kColumns = kLatent / kWarps;  // of a warp
constexpr int kSums = kColumns / 8;         // fragments of them

// kTiles at a time.
template <int kTiles>
struct Smem {
  static constexpr int kKeys = kTiles * kTileKeys;
  static constexpr int kScorePitch = kKeys + 4, kWeightPitch = kKeys + 8;
  Bf16 q[kRows][kLatentPitch];
  Bf16 keys[kKeys][kLatentPitch];
  float score[kRows][kScorePitch];
  Bf16 weight[kRows][kWeightPitch];
  float keep[kTiles][kRows];
  int most[kRows];
};

// A warp's own keys of the round: it alone waits for them before it scores them.
template <int kTiles>
__device__ inline void load_keys(const LatentJob& job, Smem<kTiles>& s, int b, int at, int end) {
  constexpr int kOwn = Smem<kTiles>::kKeys / kWarps;
  const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * kOwn;
#pragma unroll 6
  for (int i = lane; i < kOwn * kChunks; i += kWarp) {
    const int key = first + i / kChunks, chunk = i % kChunks * 8;
    const bool valid = at + key < end;
    const Bf16* from = valid ? latent_of(job, b, at + key) + chunk : nullptr;
    copy_chunk(&s.keys[key][chunk], valid ? from : static_cast<const Bf16*>(job.p.cache), valid,
               job.aligned);
  }
  copy_commit();
}

template <int kTiles>
__device__ inline void score_keys(Smem<kTiles>& s) {
  constexpr int kOwn = Smem<kTiles>::kKeys / kWarps;
  const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * kOwn;
  const uint32_t q = shared_address(&s.q[lane % 16][lane / 16 * 8]);
  float sum[kTiles][4] = {};
  if constexpr (kTiles == 1) {
    const uint32_t keys = shared_address(&s.keys[first + lane % 8][lane / 8 * 8]);
#pragma unroll 6
    for (int i = 0; i < kWidth; i += 32) {
      uint32_t a[2][4], b[4];
      load_matrices(q + 2 * i, a[0]);
      load_matrices(q + 2 * i + 32, a[1]);
      load_matrices(keys + 2 * i, b);
      mma(sum[0], a[0], {b[0], b[1]});
      mma(sum[0], a[1], {b[2], b[3]});
    }
  } else {
    static_assert(kTiles == 2);
    const uint32_t keys =
        shared_address(&s.keys[first + lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
#pragma unroll 6
    for (int i = 0; i < kWidth; i += 16) {
      uint32_t a[4], b[4];
      load_matrices(q + 2 * i, a);
      load_matrices(keys + 2 * i, b);
      mma(sum[0], a, {b[0], b[1]});
      mma(sum[1], a, {b[2], b[3]});
    }
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(
          &s.score[lane / 4 + 8 * half][first + 8 * j + lane % 4 * 2]) = {sum[j][2 * half],
                                                                          sum[j][2 * half + 1]};
}

// Thread (row, 4 * r + t) has the positions 16 r + 2t, 16 r + 2t + 1 and 8 further ones. seen: of the
// round's positions, how many come before the row's tail
template <int kTiles>
__device__ inline void weigh_keys(Smem<kTiles>& s, float scale, int seen, float& top, float& sum) {
  const int row = threadIdx.x / 16, t = threadIdx.x % 4, r = threadIdx.x % 16 / 4;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    float score[4], largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = j * kTileKeys + 16 * r + i / 2 * 8 + 2 * t + i % 2;
      score[i] = key < seen ? s.score[row][key] * scale : -INFINITY;
      largest = fmaxf(largest, score[i]);
    }
#pragma unroll
    for (int d = 1; d < 16; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    largest = fmaxf(largest, top);
    const float base = base_of(largest), keep = exp2_of(top - base);
    float added[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = exp2_of(score[2 * i] - base), high = exp2_of(score[2 * i + 1] - base);
      added[i] = low + high;
      *reinterpret_cast<uint32_t*>(
          &s.weight[row][j * kTileKeys + 16 * r + i * 8 + 2 * t]) = pack(low, high);
    }
    float all = added[0] + added[1];
    all += __shfl_xor_sync(~0u, all, 4);
    all += __shfl_xor_sync(~0u, all, 8);
    all += __shfl_xor_sync(~0u, all, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    sum = fmaf(sum, keep, all);
    top = largest;
    if (threadIdx.x % 16 == 0) s.keep[j][row] = keep;
  }
}

// The first `tiles` of the round.
template <int kTiles>
__device__ inline void add_keys(const Smem<kTiles>& s, int tiles, float (&sum)[kSums][4]) {
  const int lane = threadIdx.x % kWarp, column = threadIdx.x / kWarp * kColumns;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    if (j >= tiles) break;
    const float keep[] = {s.keep[j][lane / 4], s.keep[j][lane / 4 + 8]};
#pragma unroll
    for (int n = 0; n < kSums; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] *= keep[i / 2];
#pragma unroll
    for (int k = j * kTileKeys; k < (j + 1) * kTileKeys; k += 16) {
      uint32_t a[4];
      load_matrices(shared_address(&s.weight[lane % 16][k + lane / 16 * 8]), a);
      const uint32_t keys = shared_address(&s.keys[k + lane % 16][column + lane / 16 * 8]);
#pragma unroll
      for (int n = 0; n < kSums; n += 2) {
        uint32_t b[4];
        load_transposed(keys + 16 * n, b);
        mma(sum[n], a, {b[0], b[1]});
        mma(sum[n + 1], a, {b[2], b[3]});
      }
    }
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles == 1 ? 2 : 1)
    latent_mma_kernel(const __grid_constant__ LatentJob job) {
  using S = Smem<kTiles>;
  extern __shared__ __align__(16) char bytes[];
  S& s = *reinterpret_cast<S*>(bytes);
  wait_for_previous();
  let_next_begin();
  const MlaAttentionParams& p = job.p;
  const int tiles = ceil_div(job.rows(), kRows), b = blockIdx.x / tiles;
  const int first = blockIdx.x % tiles * kRows, rows = min(kRows, job.rows() - first);
  const int row = threadIdx.x / 16, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int body = row < rows ? LatentNode(p, job.b + b, job.n + (first + row) / p.H).body() : 0;
  if (threadIdx.x % 16 == 0) s.most[row] = body;
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int r = i / kChunks, chunk = i % kChunks * 8;
    copy_chunk(&s.q[r][chunk], query_of(job, b, first + min(r, rows - 1)) + chunk, r < rows,
               job.aligned);
  }
  copy_commit();
  copy_wait<0>();
  __syncthreads();  // q and the rows' bodies are there
  int most = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) most = max(most, s.most[r]);
  const int splits = splits_of(most);

  for (int round = 0; round * static_cast<int>(gridDim.y) < splits; ++round) {
    const int part = part_of_round(round, splits);
    if (part < 0) continue;
    const int begin = split_begin(part), end = min(split_begin(part + 1), most);
    float sums[kSums][4] = {}, top = -INFINITY, sum = 0;
    for (int at = begin; at < end; at += S::kKeys) {
      load_keys<kTiles>(job, s, b, at, end);
      copy_wait<0>();
      __syncwarp();
      score_keys<kTiles>(s);
      __syncthreads();  // all scores are there, and all keys
      weigh_keys<kTiles>(s, p.scale * kLog2E, min(body, end) - at, top, sum);
      __syncthreads();  // all weights are there
      add_keys<kTiles>(s, ceil_div(end - at, kTileKeys), sums);
      __syncthreads();  // the round's keys and weights are used up
    }
    if (threadIdx.x % 16 == 0 && row < rows) *stats_of(job, b, first + row, part) = {top, sum};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane / 4 + 8 * half;
      Bf16* to = part_of(job, b, first + min(r, rows - 1), part) + warp * kColumns;
      store_part(sums, half, to, r < rows);
    }
  }
}

}  // namespace

void latent_mma(const LatentJob& job, Stream stream) {
  const int x = job.B * ceil_div(job.rows(), kRows);
  const auto with = [&](auto tiles, DynamicSmem smem) {
    const int blocks = processors() * (tiles() == 1 ? 2 : 1);
    const int y = std::min(std::max(blocks / x, 1), job.parts);
    launch(latent_mma_kernel<tiles()>,
           {.blocks = dim3(x, y), .threads = kThreads, .smem = smem, .early = true}, stream, job);
  };
  with(std::integral_constant<int, 1>{}, smem_up_to<int{sizeof(Smem<1>)}>());
}

namespace {

void run(const LatentJob& job, Stream stream) {
  const int busy = device_has_wgmma() ? latent_sm90(job, stream) : 0;
  if (!busy) latent_mma(job, stream);
  latent_merge(job, busy ? busy : processors(), stream);
}

}  // namespace

// As many nodes at a time as the workspace holds parts of, or fewer, so that the times are even.
void latent_attention(const MlaAttentionParams& p, Stream stream) {
  LatentJob job{.p = p};
  job.parts = splits_of(static_cast<int>(int64_t{p.max_pages} * kPage));
  const auto on_16 = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  job.aligned = on_16(p.q) && on_16(p.cache);
  const int64_t node = int64_t{p.H} * job.parts * kLatentPart;
  const int nodes = static_cast<int>(std::min<int64_t>(p.workspace_bytes / node, int64_t{p.B} * p.N));
  const auto even = [](int all, int most) { return ceil_div(all, ceil_div(all, most)); };
  job.B = even(p.B, std::max(nodes / p.N, 1)), job.N = even(p.N, std::min(nodes, p.N));
  const LatentJob most = job;
  for (job.b = 0; job.b < p.B; job.b += most.B)
    for (job.n = 0; job.n < p.N; job.n += most.N) {
      job.B = std::min(most.B, p.B - job.b), job.N = std::min(most.N, p.N - job.n);
      run(job, stream);
    }
}

}  // namespace kdtree::cuda
