// SwiGLU: the gated activation between a feed-forward layer's two products.
//
//   y[t, f] = silu(x[t, f]) * x[t, F + f],  silu(g) = g / (1 + exp(-g))
//
// Grid    a block per row and per kThreads 16-byte vectors of it.
// Reads   x once.
// Floor   3 * T * F elements of HBM: at F = 18432, bf16, T = 64 that is 7.1 MB, 1.5 us at
//         4.8 TB/s (H200).
// Needs   nothing: where F, x or y are not made of 16-byte vectors, elements are moved one by one.
#include "common.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 128;

template <class Element>
constexpr int kVec = 16 / sizeof(Element);

template <class Element, bool kAligned>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const __grid_constant__ SwigluParams p) {
  begin_early();
  const int64_t row = blockIdx.x;
  const int f = (blockIdx.y * kThreads + threadIdx.x) * kVec<Element>;
  if (f >= p.F) return;
  const auto* x = static_cast<const Element*>(p.x) + row * 2 * p.F;
  auto* y = static_cast<Element*>(p.y) + row * p.F;

  float gate[kVec<Element>], up[kVec<Element>];
  load<kAligned>(x + f, p.F - f, gate);
  load<kAligned>(x + p.F + f, p.F - f, up);
  for (int i = 0; i < kVec<Element>; ++i)
    up[i] *= gate[i] / (1 + expf(-gate[i]));  // exp = inf makes it -0
  store<kAligned>(y + f, p.F - f, up);
}

}  // namespace

void swiglu(const SwigluParams& p, Stream stream) {
  dispatch(p.dtype, [&](auto element) {
    using Element = decltype(element);
    const bool vectors = aligned<Element>(p.x, p.F) && aligned<Element>(p.y, p.F);
    dispatch(vectors, [&](auto is_aligned) {
      const unsigned parts = ceil_div(p.F, kThreads * kVec<Element>);
      const Grid grid{
          .blocks = dim3(static_cast<unsigned>(p.T), parts), .threads = kThreads, .early = true};
      launch(swiglu_kernel<Element, is_aligned.value>, grid, stream, p);
    });
  });
}

}  // namespace kdtree::cuda
