// Product with INT4 weights of float32 rows. Of bf16 rows: tensor_cores/int4_linear_mma.cu,
// int4_linear_few.cu and int4_linear_sm90.cu.
//
//   y[t, o] = sum_i x[t, i] * (code[o, i] - 8) * scale[o, i / 32]
//
// Grid    one block per (block of up to kRows rows, tile row of 32 outputs), rows first, so that
//         neighbours share weights in L2; warp w takes the tiles w, w + kWarps, ... of a tile row.
// Smem    R rows of the tiles in flight, as floats, per warp; then the warps' sums, added in order.
// Reads   weights once per row block (from HBM once), x once per tile row (from L2).
// Floor   O * I * (1/2 + 1/8) bytes of HBM: 18.4 MB at O = 4096, I = 7168, 4.3 us at 4.3 TB/s
//         (H200). On CUDA cores, R rows cost 36 R fma a lane and tile: bound by these from R = 2 on.
// Needs   w on 16 bytes.
#include "int4.cuh"
#include "tensor_cores/int4_product.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRows = 8;

// Tiles that a warp loads ahead: enough bytes in flight, few enough registers.
template <int R>
constexpr int kAhead = R == 1       ? 4
                       : R == kRows ? 1
                                    : 2;

// The rows of a block: a row has the same bits in each.
int row_block(int T) { return T > 4 ? kRows : T > 2 ? 4 : T; }

template <class Element, int R>
__global__ void __launch_bounds__(kThreads)
    int4_linear_kernel(const __grid_constant__ Int4LinearParams p) {
  __shared__ alignas(16) float stage[kWarps][kAhead<R> * R * kInt4Tile];
  __shared__ float partial[kWarps][R * kInt4Tile];
  const int tiles = p.I / kInt4Tile, first = blockIdx.x * R, warp = threadIdx.x / kWarp;
  const int64_t tile_row = blockIdx.y;

  const Element* x[R];
#pragma unroll
  for (int r = 0; r < R; ++r)  // beyond the last row, the last row again: it is not stored
    x[r] = static_cast<const Element*>(p.x) + min(first + r, p.T - 1) * p.x_stride;
  int4_tiles<R, kAhead<R>>(p.w + tile_row * tiles * kInt4Words,
                           static_cast<const Element*>(p.scale) + tile_row * tiles * kInt4Tile,
                           tiles, warp, kWarps, x, stage[warp], partial[warp]);
  __syncthreads();

  const int r = threadIdx.x / kInt4Tile, o = threadIdx.x % kInt4Tile;
  if (r >= R || first + r >= p.T) return;
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += partial[w][threadIdx.x];
  static_cast<Element*>(p.y)[int64_t{first + r} * p.O + tile_row * kInt4Tile + o] = Element(sum);
}
static_assert(kRows * kInt4Tile <= kThreads, "a thread per sum");

void int4_linear_bf16(const Int4LinearParams& p, Stream stream) {
  const Product product{
      .w = p.w,
      .scale = p.scale,
      .x = static_cast<const Bf16*>(p.x),
      .y = p.y,
      .x_row = p.x_stride,
      .T = p.T,
      .G = 1,
      .O = p.O,
      .I = p.I,
      .y_dtype = p.dtype,
  };
  constexpr int kFewRows = 8;  // that mma.sync serves as well
  const bool vectors = aligned<Bf16>(p.x, p.x_stride) && aligned<Bf16>(p.scale, 0);
  const bool wgmma = p.T > kFewRows && vectors && device_has_wgmma();
  if (wgmma && (int4_linear_few(product, stream) || int4_linear_sm90(product, stream))) return;
  int4_linear_mma(product, stream);
}

}  // namespace

void int4_linear(const Int4LinearParams& p, Stream stream) {
  if (p.dtype == DType::bf16) return int4_linear_bf16(p, stream);
  dispatch<1, 2, 4, kRows>(row_block(p.T), "rows", [&](auto R) {
    const dim3 blocks(ceil_div(p.T, R), p.O / kInt4Tile);
    launch(int4_linear_kernel<float, R>, {blocks, kThreads}, stream, p);
  });
}

}  // namespace kdtree::cuda
