// mla_attention for latents of 512 + 64 features in bf16: a row's tail, and the merge of its parts.
//
// Grid    x = (sequence, node, 16 heads), y = 64 * kNT of the 512 features. Begins before the kernel
//         of the splits has ended: the tail does not depend on it.
// Tiling  8 warps. The tail: two score 8 of its 16 positions each, all add 8 * kNT features. The merge:
//         a thread has 8 features of a row, of all parts or of every second run of 16.
// Order   the parts of even runs of 16, those of odd ones, the sum of both, the tail.
// Smem    16 queries, 16 latents, scores, weights, factors of the parts: 48 KB.
// Floor   the parts' bytes: 1032 a row and split, from L2.
#include <algorithm>

#include "../fp8.cuh"
#include "latent.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kRows = 16, kThreads = 256, kRun = 16;
constexpr int kHeld = 6 * kRun;  // parts whose factors are in shared memory
constexpr int kFactorPitch = kHeld + 4;

struct Smem {
  Bf16 q[kRows][kLatentPitch], keys[kTail][kLatentPitch];
  float score[kRows][kTail + 4];
  Bf16 weight[kRows][kTail + 8];
  float keep[kRows], sum[kRows];
  float factor[kRows][kFactorPitch];
};
// Where queries and latents stood: what the tail and, if another thread has them, odd runs add.
template <int kNT>
struct Added {
  float tail[kRows][64 * kNT + 4], odd[kNT == 1 ? kRows : 1][64 * kNT + 4];
};

// Eight features of a latent in FP8, from `first` on.
__device__ inline uint4 widened_chunk(const uint8_t* row, int first) {
  if (first >= kLatent)
    return *reinterpret_cast<const uint4*>(rope_of(row, kLatent) + first - kLatent);
  return widen_eight(*reinterpret_cast<const uint2*>(row + first), *scale_of(row, kLatent));
}

__device__ inline void load_tail(const LatentJob& job, Smem& s, const LatentNode& node, int b,
                                 int at) {
  for (int i = threadIdx.x; i < kTail * kChunks; i += kThreads) {
    const int key = i / kChunks, chunk = i % kChunks * 8;
    const bool valid = at + key <= node.position;
    const int slot = node.slot(valid ? at + key : node.position);
    Bf16* to = &s.keys[key][chunk];
    if (job.p.fp8_bytes)
      *reinterpret_cast<uint4*>(to) = valid ? widened_chunk(fp8_latent_of(job, b, slot), chunk) : uint4{};
    else
      copy_chunk(to, latent_of(job, b, slot) + chunk, valid, job.aligned);
  }
  copy_commit();
}

__device__ inline void score_tail(Smem& s) {
  const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * 8;
  const uint32_t q = shared_address(&s.q[lane % 16][lane / 16 * 8]);
  const uint32_t keys = shared_address(&s.keys[first + lane % 8][lane / 8 * 8]);
  float sum[4] = {};
#pragma unroll 6
  for (int i = 0; i < kWidth; i += 32) {
    uint32_t a[2][4], b[4];
    load_matrices(q + 2 * i, a[0]);
    load_matrices(q + 2 * i + 32, a[1]);
    load_matrices(keys + 2 * i, b);
    mma(sum, a[0], {b[0], b[1]});
    mma(sum, a[1], {b[2], b[3]});
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) s.score[lane / 4 + i / 2 * 8][first + lane % 4 * 2 + i % 2] = sum[i];
}

// Thread (row, position).
__device__ inline void weigh_tail(Smem& s, float scale, int seen, float& top, float& sum) {
  const int row = threadIdx.x / kTail, key = threadIdx.x % kTail;
  const float score = key < seen ? s.score[row][key] * scale : -INFINITY;
  float largest = score;
  for (int d = 1; d < kTail; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  largest = fmaxf(largest, top);
  const float base = base_of(largest), keep = exp2_of(top - base), weight = exp2_of(score - base);
  float added = weight;
  for (int d = 1; d < kTail; d *= 2) added += __shfl_xor_sync(~0u, added, d);
  sum = fmaf(sum, keep, added);
  top = largest;
  s.weight[row][key] = Bf16(weight);
  if (key == 0) s.keep[row] = keep;
}

// Tops and sums of weights of parts first .. first + count - 1: this thread's share of a row's.
struct Stats {
  float2 v[kHeld / 16];
  __device__ Stats(const LatentJob& job, int b, int row, bool valid, int first, int count) {
    const float2* stats = stats_of(job, b, row, first);
#pragma unroll
    for (int k = 0; k < kHeld / 16; ++k) {
      const int i = threadIdx.x % 16 + 16 * k;
      v[k] = valid && i < count ? __ldcg(stats + i) : float2{-INFINITY, 0};
    }
  }
  __device__ float top() const {
    float top = -INFINITY;
#pragma unroll
    for (int k = 0; k < kHeld / 16; ++k) top = fmaxf(top, v[k].x);
    return top;
  }
  // Factors of the parts, zeros up to a whole run, and this thread's share of the sum of weights.
  __device__ void weigh(Smem& s, float top, float& sum) const {
#pragma unroll
    for (int k = 0; k < kHeld / 16; ++k) {
      const float factor = exp2_of(v[k].x - base_of(top));
      s.factor[threadIdx.x / 16][threadIdx.x % 16 + 16 * k] = factor;
      sum = fmaf(factor, v[k].y, sum);
    }
  }
};

// 8 features of a run of parts.
struct Run {
  int4 v[kRun];
  __device__ void load(const Bf16* part, int count) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const auto* from = reinterpret_cast<const int4*>(part + int64_t{i} * kLatent);
      v[i] = i < count ? __ldcg(from) : int4{};
    }
  }
  __device__ void add(const float* factor, float (&sum)[8]) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const auto& values = reinterpret_cast<const Vec<Bf16>&>(v[i]);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] = fmaf(factor[i], float(values.v[e]), sum[e]);
    }
  }
};

// sum += factor * part over every second run, from `first` on. ready: that one is in `run`
__device__ inline void add_parts(const Bf16* part, const float* factor, int count, int first,
                                 bool ready, Run& run, float (&sum)[8]) {
  for (int i = first; i < count; i += 2 * kRun, ready = false) {
    if (!ready) run.load(part + int64_t{i} * kLatent, count - i);
    run.add(factor + i, sum);
  }
}

template <int kNT>
__global__ void __launch_bounds__(kThreads, 2)
    latent_merge_kernel(const __grid_constant__ LatentJob job) {
  extern __shared__ __align__(16) char bytes[];
  Smem& s = *reinterpret_cast<Smem*>(bytes);
  let_next_begin();
  const MlaAttentionParams& p = job.p;
  const int groups = ceil_div(p.H, kRows), head = blockIdx.x % groups * kRows;
  const int n = blockIdx.x / groups % job.N, b = blockIdx.x / groups / job.N;
  const int heads = min(kRows, p.H - head), first_row = n * p.H + head;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int column = blockIdx.y * kNT * 64 + warp * kNT * 8;
  constexpr int kChunk = 8 * kNT;  // threads of a row
  const LatentNode node(p, job.b + b, job.n + n);
  const int row = threadIdx.x / 16;
  Bf16* out = static_cast<Bf16*>(p.out) +
              ((int64_t{job.b + b} * p.N + job.n + n) * p.H + head) * kLatent + blockIdx.y * kNT * 64;
  if (node.position < 0) {
    for (int i = threadIdx.x; i < heads * kChunk; i += kThreads)
      *reinterpret_cast<int4*>(out + int64_t{i / kChunk} * kLatent + i % kChunk * 8) = {};
    return wait_for_previous();
  }

  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int r = i / kChunks, chunk = i % kChunks * 8;
    copy_chunk(&s.q[r][chunk], query_of(job, b, first_row + min(r, heads - 1)) + chunk, r < heads,
               job.aligned);
  }
  const int body = node.body();
  float tail[kNT][4] = {}, top = -INFINITY, sum = 0;
  for (int at = body; at <= node.position; at += kTail) {
    load_tail(job, s, node, b, at);
    copy_wait<0>();
    __syncthreads();  // queries and latents are there
    if (warp < 2) score_tail(s);
    __syncthreads();  // the scores are there
    weigh_tail(s, p.scale * kLog2E, node.position + 1 - at, top, sum);
    __syncthreads();  // the weights are there
    uint32_t a[4];
    load_matrices(shared_address(&s.weight[lane % 16][lane / 16 * 8]), a);
#pragma unroll
    for (int i = 0; i < kNT; ++i) {
      uint32_t m[2];
      const uint32_t keys = shared_address(&s.keys[lane % 16][column + 8 * i]);
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                   : "=r"(m[0]), "=r"(m[1])
                   : "r"(keys));
#pragma unroll
      for (int e = 0; e < 4; ++e) tail[i][e] *= s.keep[lane / 4 + e / 2 * 8];
      mma(tail[i], a, m);
    }
    __syncthreads();  // latents and weights are used up
  }

  auto& added = reinterpret_cast<Added<kNT>&>(s);
  static_assert(sizeof added <= sizeof s.q + sizeof s.keys);
#pragma unroll
  for (int i = 0; i < kNT; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      added.tail[lane / 4 + e / 2 * 8][warp * kNT * 8 + 8 * i + lane % 4 * 2 + e % 2] = tail[i][e];

  wait_for_previous();
  const int splits = splits_of(body);
  const bool valid = row < heads;

  // This thread's 8 features of a row, of each 128; its runs, where two threads share them.
  constexpr int kWide = kChunk < 16 ? kChunk : 16;
  constexpr bool kShared = kWide * kRows < kThreads;
  const int r = threadIdx.x / kWide % kRows, parity = threadIdx.x / (kWide * kRows);
  const auto part_at = [&](int first, int chunk) {
    return part_of(job, b, first_row + min(r, heads - 1), first) + blockIdx.y * kNT * 64 + chunk * 8;
  };
  Run run;  // the first one is on its way while the factors are made
  run.load(part_at(parity * kRun, threadIdx.x % kWide), splits - parity * kRun);
  const Stats stats(job, b, first_row + row, valid, 0, splits);
  float all_top = fmaxf(top, stats.top());
#pragma unroll 4
  for (int i = kHeld + threadIdx.x % 16; i < splits; i += 16)
    if (valid) all_top = fmaxf(all_top, __ldcg(stats_of(job, b, first_row + row, i)).x);
  for (int d = 1; d < 16; d *= 2) all_top = fmaxf(all_top, __shfl_xor_sync(~0u, all_top, d));
  float share = 0;
  stats.weigh(s, all_top, share);
  __syncthreads();  // the factors are there
#pragma unroll 1
  for (int chunk = threadIdx.x % kWide; chunk < kChunk; chunk += kWide) {
    const bool once = chunk < kWide;
    float even[8] = {}, odd[8] = {};
    for (int first = 0; first < splits; first += kHeld) {
      const int count = min(kHeld, splits - first);
      if (splits > kHeld && !(once && first == 0)) {
        float again = 0;
        const Stats stats(job, b, first_row + row, valid, first, count);
        __syncthreads();  // the factors before are used up
        stats.weigh(s, all_top, once ? share : again);
        __syncthreads();  // the factors are there
      }
      const Bf16* part = part_at(first, chunk);
      add_parts(part, s.factor[r], count, parity * kRun, once && first == 0, run, even);
      if constexpr (!kShared) add_parts(part, s.factor[r], count, kRun, false, run, odd);
    }
    if (once) {
      for (int d = 1; d < 16; d *= 2) share += __shfl_xor_sync(~0u, share, d);
      if (threadIdx.x % 16 == 0) {
        s.keep[row] = exp2_of(top - all_top);  // of the tail
        s.sum[row] = fmaf(s.keep[row], sum, share);
      }
      if (kShared && parity)
#pragma unroll
        for (int e = 0; e < 8; ++e) added.odd[r % (kShared ? kRows : 1)][chunk * 8 + e] = even[e];
      __syncthreads();  // the rows' sums are there, the tail's and those of odd runs
    }
    if (parity || r >= heads) continue;
    Vec<Bf16> v;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float all = even[e] + (kShared ? added.odd[r % (kShared ? kRows : 1)][chunk * 8 + e] : odd[e]);
      v.v[e] = Bf16(fmaf(s.keep[r], added.tail[r][chunk * 8 + e], all) / s.sum[r]);
    }
    *reinterpret_cast<Vec<Bf16>*>(out + int64_t{r} * kLatent + chunk * 8) = v;
  }
}

template <int kNT>
void launch_merge(const LatentJob& job, Stream stream) {
  const dim3 blocks(job.B * job.N * ceil_div(job.p.H, kRows), kLatent / (64 * kNT));
  launch(latent_merge_kernel<kNT>,
         {.blocks = blocks, .threads = kThreads, .smem = smem_up_to<int{sizeof(Smem)}>(), .early = true},
         stream, job);
}

}  // namespace

// As many blocks as find room at once, two a processor: a second wave's tails would follow the splits.
// Where the splits leave room for too few, all come behind them.
void latent_merge(const LatentJob& job, int busy, Stream stream) {
  const int64_t blocks = int64_t{job.B} * job.N * ceil_div(job.p.H, kRows);
  int64_t room = 2 * std::max(processors() - busy, 0);
  if (room < 2 * blocks) room = 2 * processors();
  if (blocks * 8 <= room) return launch_merge<1>(job, stream);
  if (blocks * 4 <= room) return launch_merge<2>(job, stream);
  if (blocks * 2 <= room) return launch_merge<4>(job, stream);
  launch_merge<8>(job, stream);
}

}  // namespace kdtree::cuda
