// The torch face of the dense ops: per op, one function that checks its tensors, allocates its
// outputs and fills a Params; then the registrations.
#include "ops.h"

namespace kdtree {
namespace {

template <auto Launch>
Tensor rms_norm(const Tensor x, const Tensor w, double eps) {
  check_rows("x", x);
  check("w", w, {x.size(1)}, x.scalar_type(), x);
  auto y = empty(x, {x.size(0), x.size(1)}, x.scalar_type());
  if (y.numel() == 0) return y;
  run_on<Launch>(x, RmsNormParams{
                        .x = data(x),
                        .w = data(w),
                        .y = mutable_data(y),
                        .x_stride = x.stride(0),
                        .T = extent("x", x.size(0)),
                        .D = extent("x", x.size(1)),
                        .eps = static_cast<float>(eps),
                        .dtype = dtype_of("x", x),
                    });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kdtree, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm<cpu::rms_norm>));
}

#ifdef KDTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm<cuda::rms_norm>));
}
#endif

}  // namespace kdtree
