// Appends rows to the latent cache.
//
//   cache[slot[t]] = (latent[t] / sqrt(mean(latent[t]^2) + eps) * w | rotate(rope[t], position[t]))
//
// In FP8 the normed latent's codes and their scale: see attention.h.
//
// Grid    one block per row; thread i owns features i, i + kThreads, ... and the pairs likewise.
// Reads   the row twice, in FP8 three times (but once from L1), w and one row of the rotation table.
// Floor   2 * T * (C + R) elements of HBM: at 576 bf16 and T = 64 that is 147 KB, in FP8 116 KB, so
//         this kernel is bound by launch latency.
// Needs   nothing: elements are read one by one, coalesced.
#include "early.cuh"
#include "fp8.cuh"
#include "mla.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 128;

constexpr int kWarps = kThreads / kWarp;

// The norm's factor of a row.
template <class Element>
__device__ float norm_scale(const MlaAppendParams& p, const Element* x) {
  float sum = 0;
  for (int c = threadIdx.x; c < p.C; c += kThreads) {
    const float a = float(x[c]);
    sum = fmaf(a, a, sum);
  }
  __shared__ float partial[kWarps];
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
  __syncthreads();  // the warps' sums are there
  sum = 0;
  for (float s : partial) sum += s;
  return rsqrtf(sum / p.C + p.eps);
}

// The codes of latent(c), and their scale.
template <class Latent>
__device__ void store_fp8(int C, Latent&& latent, uint8_t* row) {
  float most = 0;
  for (int c = threadIdx.x; c < C; c += kThreads) most = fmaxf(most, fabsf(latent(c)));
  __shared__ float largest[kWarps];
  for (int d = kWarp / 2; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
  if (threadIdx.x % kWarp == 0) largest[threadIdx.x / kWarp] = most;
  __syncthreads();  // the warps' largest are there
  for (float x : largest) most = fmaxf(most, x);
  const float scale = fp8_scale(most);
  for (int c = threadIdx.x; c < C; c += kThreads) row[c] = to_e4m3(latent(c) / scale);
  if (threadIdx.x == 0) *scale_of(row, C) = scale;
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    mla_append_kernel(const __grid_constant__ MlaAppendParams p) {
  begin_early();
  const int slot = p.slot[blockIdx.x];
  if (slot < 0 || slot >= p.slots) return;
  const auto* x = static_cast<const Element*>(p.kv) + blockIdx.x * p.kv_stride;
  const auto* w = static_cast<const Element*>(p.w);
  const float norm = norm_scale(p, x);
  const auto latent = [&](int c) { return float(x[c]) * norm * float(w[c]); };
  const int position = min(max(p.position[blockIdx.x], 0), p.positions - 1);
  const float* table = p.rope + int64_t{position} * p.R;
  const auto store = [&](auto* rope) {
    for (int i = threadIdx.x; i < p.R / 2; i += kThreads)
      rotate_pair(x + p.C, table, p.R, p.interleaved, i, rope);
  };
  if (p.fp8_bytes) {
    auto* row = static_cast<uint8_t*>(p.cache) + int64_t{slot} * p.fp8_bytes;
    store_fp8(p.C, latent, row);
    return store(rope_of(row, p.C));
  }
  auto* y = static_cast<Element*>(p.cache) + int64_t{slot} * (p.C + p.R);
  for (int c = threadIdx.x; c < p.C; c += kThreads) y[c] = Element(latent(c));
  store(y + p.C);
}

}  // namespace

void mla_append(const MlaAppendParams& p, Stream stream) {
  dispatch(p.dtype, [&](auto element) {
    const Grid grid{.blocks = p.T, .threads = kThreads, .early = true};
    launch(mla_append_kernel<decltype(element)>, grid, stream, p);
  });
}

}  // namespace kdtree::cuda
