// mla_attention for latents of 512 + 64 features in bf16: a row's tail, and the merge of its parts.
//
// Grid    x = (sequence, node, 16 heads), y = kNT * 64 of the 512 features. Begins before the kernel
//         of the splits has ended: the tail does not depend on it.
// Tiling  8 warps: two score 8 of the tail's 16 positions each, all add 8 * kNT features of latents,
//         then of the parts, in the fragments' layout.
// Smem    16 queries, 16 latents, scores, weights, factors of the parts: 48 KB.
// Floor   the parts' bytes: 2064 a row and split, from L2.
#include "latent.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kRows = 16, kThreads = 256, kRun = 128;  // parts whose factors are held at once
constexpr int kFactorPitch = kRun + 4;

struct Smem {
  Bf16 q[kRows][kLatentPitch], keys[kTail][kLatentPitch];
  float score[kRows][kTail + 4];
  Bf16 weight[kRows][kTail + 8];
  float keep[kRows], top[kRows], sum[kRows];
  float factor[kRows][kFactorPitch];
};

__device__ inline void load_tail(const LatentJob& job, Smem& s, const LatentNode& node, int b,
                                 int at) {
  for (int i = threadIdx.x; i < kTail * kChunks; i += kThreads) {
    const int key = i / kChunks, chunk = i % kChunks * 8;
    const bool valid = at + key <= node.position;
    const Bf16* from = latent_of(job, b, node.slot(valid ? at + key : node.position));
    copy_chunk(&s.keys[key][chunk], from + chunk, valid, job.aligned);
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

// Factors of parts first .. first + count - 1, and this thread's share of the sum of weights.
__device__ inline void weigh_parts(const LatentJob& job, Smem& s, int b, int row, bool valid,
                                   int first, int count, float top, float& sum) {
  for (int i = threadIdx.x % 16; i < count; i += 16) {
    const float* part = partial_of(job, b, row, first + i) + kLatent;
    const float2 v = valid ? __ldcg(reinterpret_cast<const float2*>(part)) : float2{0, 0};
    const float factor = exp2_of(v.x - top);
    s.factor[threadIdx.x / 16][i] = factor;
    sum = fmaf(factor, v.y, sum);
  }
}

template <int kNT>
__global__ void __launch_bounds__(kThreads, 2)
    latent_merge_kernel(const __grid_constant__ LatentJob job) {
  extern __shared__ __align__(16) char bytes[];
  Smem& s = *reinterpret_cast<Smem*>(bytes);
  const MlaAttentionParams& p = job.p;
  const int groups = ceil_div(p.H, kRows), head = blockIdx.x % groups * kRows;
  const int n = blockIdx.x / groups % job.N, b = blockIdx.x / groups / job.N;
  const int heads = min(kRows, p.H - head), first_row = n * p.H + head;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int column = blockIdx.y * kNT * 64 + warp * kNT * 8;
  const LatentNode node(p, job.b + b, job.n + n);
  const auto put = [&](int r, int c, float low, float high) {
    const int64_t row = (int64_t{job.b + b} * p.N + job.n + n) * p.H + head + r;
    *reinterpret_cast<uint32_t*>(static_cast<Bf16*>(p.out) + row * kLatent + c) = pack(low, high);
  };
  if (node.position < 0) {
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < kNT; ++i)
        if (const int r = lane / 4 + 8 * half; r < heads) put(r, column + 8 * i + lane % 4 * 2, 0, 0);
    return wait_for_previous();
  }

  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int r = i / kChunks, chunk = i % kChunks * 8;
    copy_chunk(&s.q[r][chunk], query_of(job, b, first_row + min(r, heads - 1)) + chunk, r < heads,
               job.aligned);
  }
  const int body = node.body(), row = threadIdx.x / 16;
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

  wait_for_previous();
  const int splits = splits_of(body);
  const bool valid = row < heads;
  float all_top = top;
  for (int i = threadIdx.x % 16; i < splits; i += 16)
    if (valid) all_top = fmaxf(all_top, __ldcg(partial_of(job, b, first_row + row, i) + kLatent));
  for (int d = 1; d < 16; d *= 2) all_top = fmaxf(all_top, __shfl_xor_sync(~0u, all_top, d));
  float share = 0, acc[kNT][4] = {};
  for (int first = 0; first < splits; first += kRun) {
    const int count = min(kRun, splits - first);
    weigh_parts(job, s, b, first_row + row, valid, first, count, all_top, share);
    __syncthreads();  // the run's factors are there
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane / 4 + 8 * half;
      if (r >= heads) continue;
      const float* part = partial_of(job, b, first_row + r, first) + column + lane % 4 * 2;
#pragma unroll(16 / kNT)
      for (int i = 0; i < count; ++i, part += kPartial) {
        const float factor = s.factor[r][i];
#pragma unroll
        for (int t = 0; t < kNT; ++t) {
          const float2 v = __ldcg(reinterpret_cast<const float2*>(part + 8 * t));
          acc[t][2 * half] = fmaf(factor, v.x, acc[t][2 * half]);
          acc[t][2 * half + 1] = fmaf(factor, v.y, acc[t][2 * half + 1]);
        }
      }
    }
    __syncthreads();  // the run's factors are used up
  }
  for (int d = 1; d < 16; d *= 2) share += __shfl_xor_sync(~0u, share, d);
  if (threadIdx.x % 16 == 0) {
    s.keep[row] = exp2_of(top - all_top);  // of the tail
    s.sum[row] = fmaf(s.keep[row], sum, share);
  }
  __syncthreads();  // the rows' sums are there
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = lane / 4 + 8 * half;
    if (r >= heads) continue;
    const float factor = s.keep[r], weight = s.sum[r];
#pragma unroll
    for (int t = 0; t < kNT; ++t)
      put(r, column + 8 * t + lane % 4 * 2,
          fmaf(factor, tail[t][2 * half], acc[t][2 * half]) / weight,
          fmaf(factor, tail[t][2 * half + 1], acc[t][2 * half + 1]) / weight);
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

// The features of a block are so many that there are some blocks for each processor.
void latent_merge(const LatentJob& job, Stream stream) {
  const int64_t blocks = int64_t{job.B} * job.N * ceil_div(job.p.H, kRows);
  if (blocks * 4 >= 4 * processors()) return launch_merge<4>(job, stream);
  if (blocks * 8 >= 2 * processors()) return launch_merge<2>(job, stream);
  launch_merge<1>(job, stream);
}

}  // namespace kdtree::cuda
