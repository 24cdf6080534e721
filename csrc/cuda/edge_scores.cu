// Scores of a depth's candidates after each one of the depth before.
//
//   out[m, m'] = score[m'] + f e(m, m'), shifted so that each m's have the mass of score;
//   e(m, m') = weight <before[m] * direction, after[m']> + more[m, m'], f = a / (1 + c T)
//
// Grid    one block per sequence and depth.
// Tiling  a warp takes the candidates m = warp, warp + kWarps, ...; a lane the m' = lane, lane + 32.
//         kChunk features at a time of both tables' rows stand in shared memory; a product's sum
//         goes over its features in order.
// Reads   M rows of each table, scattered, once; score once.
// Floor   B * J * M * (2 * R + 4 * M) elements, 400 KB at J = 7, M = R = 32: launch latency and two
//         dependent reads.
// Needs   M <= 64.
#include "block.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kFrom = kMaxNodes / kWarps;  // candidates of a warp
constexpr int kTo = kMaxNodes / kWarp;     // candidates of a lane
constexpr int kChunk = 32;                 // features in shared memory
constexpr int kStride = kChunk + 1;        // so that rows start in other banks

__device__ inline float warp_max(float x) {
  for (int d = kWarp / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

// log(sum of exp(x)) over what the lanes of a warp hold; NaN where one is, or none is finite.
__device__ inline float log_sum(const float (&x)[kTo], int M) {
  float top = -INFINITY, sum = 0;
  bool nan = false;
#pragma unroll
  for (int k = 0; k < kTo; ++k) {
    const bool used = threadIdx.x % kWarp + k * kWarp < M;
    nan |= used && x[k] != x[k];
    if (used) top = fmaxf(top, x[k]);
  }
  top = warp_max(top);
  if (__any_sync(~0u, nan) || !(fabsf(top) < INFINITY)) return NAN;
#pragma unroll
  for (int k = 0; k < kTo; ++k)
    if (threadIdx.x % kWarp + k * kWarp < M) sum += expf(x[k] - top);
  return top + logf(warp_sum(sum));
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    edge_scores_kernel(const __grid_constant__ EdgeScoresParams p) {
  begin_early();
  __shared__ float start[kMaxNodes][kStride], after[kMaxNodes][kStride];
  const int64_t at = blockIdx.x;
  const int b = at / p.J, j = at % p.J, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t root = root_of(p.token, p.length, p.X, b);

  float edge[kFrom][kTo] = {};
  for (int r0 = 0; r0 < p.R; r0 += kChunk) {
    if (r0 > 0) __syncthreads();  // the chunk before is used up
    for (int i = threadIdx.x; i < p.M * kChunk; i += kThreads) {
      const int m = i / kChunk, r = i % kChunk;
      const int64_t from = j ? p.candidate[(at - 1) * p.M + m] : root;
      const int64_t to = p.candidate[at * p.M + m];
      const auto* before = static_cast<const Element*>(p.before) + clamped_id(from, p.W) * p.R + r0;
      const auto* behind = static_cast<const Element*>(p.after) + clamped_id(to, p.W) * p.R + r0;
      const bool in = r0 + r < p.R;
      start[m][r] = in ? float(before[r]) * p.direction[at * p.R + r0 + r] : 0.f;
      after[m][r] = in ? float(behind[r]) : 0.f;
    }
    __syncthreads();  // the chunk is there
    for (int r = 0; r < kChunk; ++r)
#pragma unroll
      for (int f = 0; f < kFrom; ++f)
#pragma unroll
        for (int k = 0; k < kTo; ++k)
          edge[f][k] = fmaf(start[warp + f * kWarps][r], after[lane + k * kWarp][r], edge[f][k]);
  }

  const float factor = p.a[j] / (1 + p.c[j] * p.temperature[b]);
  const float weight = p.weight ? p.weight[j] : 0;
  float score[kTo];
#pragma unroll
  for (int k = 0; k < kTo; ++k) {
    const int to = lane + k * kWarp;
    score[k] = to < p.M ? p.score[at * p.M + to] : -INFINITY;
  }
  const float mass = log_sum(score, p.M);
#pragma unroll
  for (int f = 0; f < kFrom; ++f) {
    const int m = warp + f * kWarps;
    if (m >= p.M) return;
    const int64_t row = (at * p.M + m) * p.M;
    float moved[kTo];
#pragma unroll
    for (int k = 0; k < kTo; ++k) {
      const int to = lane + k * kWarp;
      const float more = p.more && to < p.M ? p.more[row + to] : 0;
      moved[k] = score[k] + factor * (weight * edge[f][k] + more);
    }
    const float shift = mass - log_sum(moved, p.M);
#pragma unroll
    for (int k = 0; k < kTo; ++k) {
      const int to = lane + k * kWarp;
      const float out = moved[k] + shift;
      if (to < p.M) p.out[row + to] = out == out ? out : -INFINITY;
    }
  }
}

}  // namespace

void edge_scores(const EdgeScoresParams& p, Stream stream) {
  dispatch(p.dtype, [&](auto element) {
    const Grid grid{
        .blocks = static_cast<unsigned>(p.B * p.J), .threads = kThreads, .early = true};
    launch(edge_scores_kernel<decltype(element)>, grid, stream, p);
  });
}

}  // namespace kdtree::cuda
