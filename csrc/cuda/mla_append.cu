// Appends rows to the latent cache.
//
//   cache[slot[t]] = (latent[t] / sqrt(mean(latent[t]^2) + eps) * w | rotate(rope[t], position[t]))
//
// Grid    one block per row; thread i owns features i, i + kThreads, ... and the pairs likewise.
// Reads   the row twice (the second time from L1), w and one row of the rotation table.
// Floor   2 * T * (C + R) elements of HBM: at 576 bf16 and T = 64 that is 147 KB, so this kernel is
//         bound by launch latency.
// Needs   nothing: elements are read one by one, coalesced.
#include "mla.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 128;

template <class Element>
__global__ void __launch_bounds__(kThreads)
    mla_append_kernel(const __grid_constant__ MlaAppendParams p) {
  const int slot = p.slot[blockIdx.x];
  if (slot < 0 || slot >= p.slots) return;
  const auto* x = static_cast<const Element*>(p.kv) + blockIdx.x * p.kv_stride;
  const auto* w = static_cast<const Element*>(p.w);
  auto* y = static_cast<Element*>(p.cache) + int64_t{slot} * (p.C + p.R);

  float sum = 0;
  for (int c = threadIdx.x; c < p.C; c += kThreads) {
    const float a = float(x[c]);
    sum = fmaf(a, a, sum);
  }
  __shared__ float partial[kThreads / kWarp];
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
  __syncthreads();  // the warps' sums are there
  sum = 0;
  for (float s : partial) sum += s;
  const float scale = rsqrtf(sum / p.C + p.eps);
  for (int c = threadIdx.x; c < p.C; c += kThreads)
    y[c] = Element(float(x[c]) * scale * float(w[c]));

  const int position = min(max(p.position[blockIdx.x], 0), p.positions - 1);
  const float* table = p.rope + int64_t{position} * p.R;
  for (int i = threadIdx.x; i < p.R / 2; i += kThreads)
    rotate_pair(x + p.C, table, p.R, p.interleaved, i, y + p.C);
}

}  // namespace

void mla_append(const MlaAppendParams& p, Stream stream) {
  dispatch(p.dtype, [&](auto element) {
    launch(mla_append_kernel<decltype(element)>, {p.T, kThreads}, stream, p);
  });
}

}  // namespace kdtree::cuda
