// Residual addition and RMS norm in one pass.
//
//   sum[t, d] = x[t, d] + residual[t, d], rounded to its dtype
//   y[t, d] = sum[t, d] / sqrt(mean_d(sum[t, d]^2) + eps) * w[d]
//
// Grid    one block per row, its threads a 16-byte vector each, or several of a long row.
// Reads   x and residual once, sum once more beyond a thread's first vector.
// Floor   4 * T * D elements of HBM: at D = 7168, bf16, T = 64 that is 3.7 MB, 0.8 us at
//         4.8 TB/s (H200): launch latency.
// Needs   nothing: see rms_norm.
#include "early.cuh"
#include "norm.cuh"

namespace kdtree::cuda {
namespace {

template <class Element, bool kAligned, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    add_rms_norm_kernel(const __grid_constant__ AddRmsNormParams p) {
  begin_early();
  const int64_t row = int64_t{blockIdx.x} * p.D;
  const auto* x = static_cast<const Element*>(p.x) + row;
  const auto* residual = static_cast<const Element*>(p.residual) + row;
  auto* sum = static_cast<Element*>(p.sum) + row;
  const auto read = [&](int d, NormVector<Element>& v) {
    NormVector<Element> r;
    load<kAligned>(x + d, p.D - d, v);
    load<kAligned>(residual + d, p.D - d, r);
    for (int i = 0; i < kNormVec<Element>; ++i) v[i] = float(Element(v[i] + r[i]));
    store<kAligned>(sum + d, p.D - d, v);
  };
  const auto again = [&](int d, NormVector<Element>& v) {  // what this thread wrote
    load<kAligned>(sum + d, p.D - d, v);
  };
  norm_row<kThreads, kAligned>(p.D, p.eps, static_cast<const Element*>(p.w),
                               static_cast<Element*>(p.y) + row, read, again);
}

}  // namespace

void add_rms_norm(const AddRmsNormParams& p, Stream stream) {
  dispatch(p.dtype, [&](auto element) {
    using Element = decltype(element);
    const bool vectors = aligned<Element>(p.x, p.D) && aligned<Element>(p.residual, p.D) &&
                         aligned<Element>(p.w, p.D) && aligned<Element>(p.sum, p.D) &&
                         aligned<Element>(p.y, p.D);
    dispatch(vectors, [&](auto is_aligned) {
      dispatch_norm_threads<Element>(p.D, [&](auto threads) {
        const Grid grid{
            .blocks = static_cast<unsigned>(p.T), .threads = threads.value, .early = true};
        launch(add_rms_norm_kernel<Element, is_aligned.value, threads.value>, grid, stream, p);
      });
    });
  });
}

}  // namespace kdtree::cuda
