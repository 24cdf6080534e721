// Dense product, row-invariant: the plain kernel for every shape, where rows or weights are float32.
// Of bf16 rows and weights: tensor_cores/linear_mma.cu, linear_sm90.cu, linear_rows_sm90.cu and, of
// few inputs, linear_short.cu.
//
//   y[t, g, o] = sum_i x[t, g, i] * w[g, o, i]
//
// Grid    x: blocks of R rows by blocks of O outputs, rows first, so that neighbours share weights
//         in L2; y: groups. A block's kDotWarps warps split the inputs.
// Tiling  dot.cuh has the order of the sums. R and O change what a block shares, never a bit: each
//         weight is read once per R rows, each x once per O outputs (from L1 or L2).
// Smem    kDotWarps * R * O floats.
// Floor   the weights' bytes, for every 8 rows anew: 7168 -> 384, float32, a router's, is 11 MB,
//         2.6 us at 4.3 TB/s (H200).
// Needs   nothing: where I, w or x are not made of 16-byte vectors, elements are loaded one by one.
#include "dot.cuh"
#include "early.cuh"
#include "tensor_cores/linear.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kMostRows = 8;      // of a block
constexpr int kBlocks = 3;        // of a processor at least: 168 registers a thread, no spills
constexpr int kProcessors = 148;  // of a large GPU

template <int R, int O, bool kAligned, class X, class W>
__global__ void __launch_bounds__(kDotThreads, kBlocks)
    linear_kernel(const __grid_constant__ LinearParams p) {
  wait_for_previous();
  const int row_blocks = (p.T - 1) / R + 1;
  const int t0 = blockIdx.x % row_blocks * R, o0 = blockIdx.x / row_blocks * O;
  const int64_t g = blockIdx.y;

  // Past the end the last row or output is computed again and not stored.
  const X* x[R];
  const W* w[O];
  for (int r = 0; r < R; ++r)
    x[r] = static_cast<const X*>(p.x) + min(t0 + r, p.T - 1) * p.x_row + g * p.x_group;
  for (int o = 0; o < O; ++o)
    w[o] = static_cast<const W*>(p.w) + (g * p.O + min(o0 + o, p.O - 1)) * p.I;

  const float sum = block_dot<kAligned>(x, w, p.I);
  let_next_begin();
  const int64_t t = t0 + threadIdx.x / O, o = o0 + threadIdx.x % O;
  if (threadIdx.x >= R * O || t >= p.T || o >= p.O) return;
  const int64_t at = (t * p.G + g) * p.O + o;
  if (p.y_dtype == DType::f32)
    static_cast<float*>(p.y)[at] = sum;
  else
    static_cast<X*>(p.y)[at] = X(sum);
}

template <int R, int O, bool kAligned, class X, class W>
void launch_linear(const LinearParams& p, Stream stream) {
  const int64_t blocks = ((p.T - 1) / R + 1) * int64_t{(p.O - 1) / O + 1};
  const Grid grid{.blocks = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.G)),
                  .threads = kDotThreads,
                  .early = true};
  launch(linear_kernel<R, O, kAligned, X, W>, grid, stream, p);
}

// By four outputs a block where they leave blocks enough, else by one; eight rows, which each block
// reads from L2 and which weigh more than many blocks, by two as well.
template <int R, class X, class W>
void launch_aligned(const LinearParams& p, Stream stream) {
  constexpr bool kMany = R == kMostRows;
  constexpr int64_t kEnough = kMany ? kProcessors : 4 * kProcessors;
  const auto blocks = [&](int outputs) {
    return ((p.T - 1) / R + 1) * int64_t{(p.O - 1) / outputs + 1} * p.G;
  };
  if (blocks(4) >= kEnough) return launch_linear<R, 4, true, X, W>(p, stream);
  if constexpr (kMany)
    if (blocks(2) >= kEnough) return launch_linear<R, 2, true, X, W>(p, stream);
  launch_linear<R, 1, true, X, W>(p, stream);
}

template <class X, class W>
void linear(const LinearParams& p, Stream stream) {
  const bool vectors = dot_aligned<W>(p.w, p.I, p.I) && dot_aligned<X>(p.x, p.x_row, p.I) &&
                       dot_aligned<X>(p.x, p.x_group, p.I);
  if (!vectors) return launch_linear<4, 1, false, X, W>(p, stream);
  if (p.T == 1) return launch_aligned<1, X, W>(p, stream);
  if (p.T == 2) return launch_aligned<2, X, W>(p, stream);
  if (p.T <= 4) return launch_aligned<4, X, W>(p, stream);
  launch_aligned<kMostRows, X, W>(p, stream);
}

// bf16 rows and weights, on tensor cores.
void linear_bf16(const LinearParams& p, Stream stream) {
  const Product product{
      .w = p.w,
      .x = static_cast<const Bf16*>(p.x),
      .y = p.y,
      .x_row = p.x_row,
      .x_group = p.x_group,
      .T = p.T,
      .G = p.G,
      .O = p.O,
      .I = p.I,
      .y_dtype = p.y_dtype,
  };
  const bool few = p.T <= kShortRows || p.I <= kShortManyInputs;
  if (p.I <= kShortInputs && few) return linear_short(product, stream);
  constexpr int kFewRows = 16;  // that a warp's own tiles serve better
  const bool wgmma = p.T > kFewRows && in_vectors(product) && device_has_wgmma();
  if (!wgmma || !linear_sm90(product, stream)) linear_mma(product, stream);
}

}  // namespace

void linear(const LinearParams& p, Stream stream) {
  dispatch(p.x_dtype, [&](auto x) {
    dispatch(p.w_dtype, [&](auto w) {
      if constexpr (sizeof(x) == sizeof(Bf16) && sizeof(w) == sizeof(Bf16))
        linear_bf16(p, stream);
      else
        linear<decltype(x), decltype(w)>(p, stream);
    });
  });
}

}  // namespace kdtree::cuda
