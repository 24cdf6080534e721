// Residual addition and RMS norm in one pass.
//
//   sum[t, d] = x[t, d] + residual[t, d], rounded to its dtype
//   y[t, d] = sum[t, d] / sqrt(mean_d(sum[t, d]^2) + eps) * w[d]
//
// Grid    one block per row; kNormThreads threads walk the row in 16-byte vectors.
// Reads   x and residual once, sum once after it is written (by the same thread, from L1 or L2).
// Floor   4 * T * D elements of HBM: at D = 7168, bf16, T = 64 that is 3.7 MB, 0.8 us at
//         4.8 TB/s (H200): launch latency.
// Needs   nothing: see rms_norm.
#include "norm.cuh"

namespace kdtree::cuda {
namespace {

template <class Element, bool kAligned>
__global__ void __launch_bounds__(kNormThreads)
    add_rms_norm_kernel(const __grid_constant__ AddRmsNormParams p) {
  constexpr int kVec = kNormVec<Element>;
  const int64_t row = int64_t{blockIdx.x} * p.D;
  const auto* x = static_cast<const Element*>(p.x) + row;
  const auto* residual = static_cast<const Element*>(p.residual) + row;
  const auto* w = static_cast<const Element*>(p.w);
  auto* sum = static_cast<Element*>(p.sum) + row;
  auto* y = static_cast<Element*>(p.y) + row;

  float total = 0, v[kVec], r[kVec];
  for (int d = threadIdx.x * kVec; d < p.D; d += kNormThreads * kVec) {
    load<kAligned>(x + d, p.D - d, v);
    load<kAligned>(residual + d, p.D - d, r);
    for (int i = 0; i < kVec; ++i) v[i] = float(Element(v[i] + r[i]));
    store<kAligned>(sum + d, p.D - d, v);
    total += squares(v);
  }
  const float scale = norm_scale(total, p.D, p.eps);
  for (int d = threadIdx.x * kVec; d < p.D; d += kNormThreads * kVec) {
    load<kAligned>(sum + d, p.D - d, v);  // what this thread wrote
    norm_store<kAligned>(v, w, y, d, p.D, scale);
  }
}

}  // namespace

void add_rms_norm(const AddRmsNormParams& p, Stream stream) {
  dispatch(p.dtype, [&](auto element) {
    using Element = decltype(element);
    const bool vectors = aligned<Element>(p.x, p.D) && aligned<Element>(p.residual, p.D) &&
                         aligned<Element>(p.w, p.D) && aligned<Element>(p.sum, p.D) &&
                         aligned<Element>(p.y, p.D);
    dispatch(vectors, [&](auto is_aligned) {
      const Grid grid{static_cast<unsigned>(p.T), kNormThreads};
      launch(add_rms_norm_kernel<Element, is_aligned.value>, grid, stream, p);
    });
  });
}

}  // namespace kdtree::cuda
