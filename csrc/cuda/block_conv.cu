// A convolution over the slots of a drafter's blocks, each taking in those before it.
//
//   y[t, d] = sum over k <= t % N of (base[k, d] + dynamic[t, k, d / (D / groups)]) * x[t - k, d]
//
// Grid    one block per slot; thread i owns channels i, i + kThreads, ...
// Reads   x, base and dynamic once per tap (from L2).
// Floor   2 * T * D elements of HBM: at 8 slots of 7168, bf16, 229 KB: launch latency.
// Needs   nothing: elements are read one by one, coalesced.
#include "common.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 256;

template <class Element>
__global__ void __launch_bounds__(kThreads)
    block_conv_kernel(const __grid_constant__ BlockConvParams p) {
  begin_early();
  const int64_t t = blockIdx.x;
  const int taps = min(p.taps, static_cast<int>(t % p.N) + 1), share = p.D / p.groups;
  const auto* x = static_cast<const Element*>(p.x) + t * p.D;
  const auto* base = static_cast<const Element*>(p.base);
  const auto* dynamic = static_cast<const Element*>(p.dynamic) + t * p.dynamic_stride;
  for (int d = threadIdx.x; d < p.D; d += kThreads) {
    const int group = d / share;
    float sum = 0;
    for (int k = 0; k < taps; ++k) {
      const int64_t tap = int64_t{k} * p.D;
      const float weight = float(base[tap + d]) + float(dynamic[int64_t{k} * p.groups + group]);
      sum += weight * float(x[d - tap]);
    }
    static_cast<Element*>(p.y)[t * p.D + d] = Element(sum);
  }
}

}  // namespace

void block_conv(const BlockConvParams& p, Stream stream) {
  dispatch(p.dtype, [&](auto element) {
    const Grid grid{
        .blocks = static_cast<unsigned>(p.T), .threads = kThreads, .early = true};
    launch(block_conv_kernel<decltype(element)>, grid, stream, p);
  });
}

}  // namespace kdtree::cuda
