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
  const RmsNormParams p{
      .x = data(x),
      .w = data(w),
      .y = mutable_data(y),
      .x_stride = x.stride(0),
      .T = extent("x", x.size(0)),
      .D = extent("x", x.size(1)),
      .eps = static_cast<float>(eps),
      .dtype = dtype_of("x", x),
  };
  if (y.numel() > 0) run_on<Launch>(x, p);
  return y;
}

template <auto Launch>
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor x, const Tensor residual, const Tensor w,
                                        double eps) {
  check_dim("x", x, 2);
  const int64_t T = x.size(0), D = x.size(1);
  check("x", x, {T, D}, x.scalar_type(), x);
  check("residual", residual, {T, D}, x.scalar_type(), x);
  check("w", w, {D}, x.scalar_type(), x);
  auto y = empty(x, {T, D}, x.scalar_type());
  auto sum = empty(x, {T, D}, x.scalar_type());
  const AddRmsNormParams p{
      .x = data(x),
      .residual = data(residual),
      .w = data(w),
      .y = mutable_data(y),
      .sum = mutable_data(sum),
      .T = extent("x", T),
      .D = extent("x", D),
      .eps = static_cast<float>(eps),
      .dtype = dtype_of("x", x),
  };
  if (y.numel() > 0) run_on<Launch>(x, p);
  return {y, sum};
}

// Checks x [T, I] against w [O, I], or x [T, G, I] against w [G, O, I].
void check_linear(const Tensor& x, const Tensor& w) {
  require(x.dim() == 2 || x.dim() == 3, "x has shape ", text(x.sizes()),
          ", wants [T, I] or [T, G, I]");
  const int64_t last = x.dim() - 1, I = x.size(last);
  require(I <= 1 || x.stride(last) == 1, "x must have contiguous features");
  const bool fits =
      w.dim() == x.dim() && w.size(last) == I && (last == 1 || w.size(0) == x.size(1));
  require(fits, "w has shape ", text(w.sizes()), ", wants [",
          last == 1 ? "" : std::to_string(x.size(1)) + ", ", "O, ", I, "]");
  check_device("w", w, x);
  require(w.is_contiguous(), "w must be contiguous");
}

template <auto Launch>
Tensor linear(const Tensor x, const Tensor w, std::optional<ScalarType> out_dtype) {
  const DType x_dtype = dtype_of("x", x);
  check_linear(x, w);
  const ScalarType y_type = out_dtype.value_or(x.scalar_type());
  require(y_type == x.scalar_type() || y_type == ScalarType::Float, "out_dtype is ", y_type,
          ", wants Float", x_dtype == DType::bf16 ? " or BFloat16" : "");
  const bool grouped = x.dim() == 3;
  const int64_t T = x.size(0), G = grouped ? x.size(1) : 1, O = w.size(w.dim() - 2);
  auto y = grouped ? empty(x, {T, G, O}, y_type) : empty(x, {T, O}, y_type);
  const LinearParams p{
      .x = data(x),
      .w = data(w),
      .y = mutable_data(y),
      .x_row = x.stride(0),
      .x_group = grouped ? x.stride(1) : 0,
      .T = extent("x", T),
      .G = extent("x", G),
      .O = extent("w", O),
      .I = extent("x", x.size(x.dim() - 1)),
      .x_dtype = x_dtype,
      .w_dtype = dtype_of("w", w),
      .y_dtype = dtype_of("y", y),
  };
  if (y.numel() > 0) run_on<Launch>(x, p);
  return y;
}

template <auto Launch>
Tensor swiglu(const Tensor x) {
  check_dim("x", x, 2);
  require(x.is_contiguous(), "x must be contiguous");
  require(x.size(1) % 2 == 0, "x has ", x.size(1), " features, wants an even number");
  auto y = empty(x, {x.size(0), x.size(1) / 2}, x.scalar_type());
  const SwigluParams p{
      .x = data(x),
      .y = mutable_data(y),
      .T = extent("x", x.size(0)),
      .F = extent("x", x.size(1) / 2),
      .dtype = dtype_of("x", x),
  };
  if (y.numel() > 0) run_on<Launch>(x, p);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kdtree, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm<cpu::rms_norm>));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm<cpu::add_rms_norm>));
  m.impl("linear", TORCH_BOX(&linear<cpu::linear>));
  m.impl("swiglu", TORCH_BOX(&swiglu<cpu::swiglu>));
}

#ifdef KDTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm<cuda::rms_norm>));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm<cuda::add_rms_norm>));
  m.impl("linear", TORCH_BOX(&linear<cuda::linear>));
  m.impl("swiglu", TORCH_BOX(&swiglu<cuda::swiglu>));
}
#endif

}  // namespace kdtree
