// Product of bf16 rows and bf16 weights of at most 512 inputs: one product a head, the attention's
// queries into the latent space and its outputs out of it.
//
//   y[t, g, o] = sum_i x[t, g, i] * w[g, o, i]
//
// Of queries (mla_query) also y[t, g, O + r] = rotate(x[t, g, I + r]), padded rows zero, and in the
// same launch mla_append. It begins early, and lets the next kernel do so.
//
// Grid    x: tiles of kBM outputs x kBN rows, rows first, so that neighbours share weights in L2;
//         y: groups, before them blocks whose warps append a row each. Many rows: as many blocks as
//         are resident at once, each takes row tiles in turn.
// Tiling  all of a tile's inputs are requested at once, by asynchronous copies in steps of 64, and
//         multiplied as they come; a warp multiplies 16 * kMT outputs by 8 * kNT rows, with many rows
//         on sm_90a a warpgroup 64 outputs by kBN rows. The blocks that have the same rows rotate a
//         share of them each while their copies are on the way.
// Order   one chain of mma in input order: that of the other products, whose inputs make one run.
// Smem    the tile's weights and rows; with many rows those of the next tile too.
// Reads   weights once per kBN rows (many: once a block), x once per kBM outputs (from L2).
// Floor   the weights' bytes: 64 heads of 128 -> 512 are 8.4 MB, 1.9 us at 4.4 TB/s (H200); from some
//         64 rows on the outputs': 2048 rows are 134 MB of them, 41 us with what is read.
// Needs   nothing: where rows or weights are not made of 16-byte vectors, elements are loaded.
#pragma once

#include "../early.cuh"
#include "linear.cuh"
#include "mma_stage.cuh"
#include "short_store.cuh"
#include "wgmma.cuh"

namespace kdtree::cuda {

inline constexpr int kShortSteps = kShortInputs / kStep;

// kRing: of a block's tiles of rows, one after the other, the next one is on its way. kWgmma: a
// warpgroup multiplies 64 outputs by kBN rows.
template <int kBM_, int kBN_, int kMT_, int kNT_, bool kRing_ = false, bool kWgmma_ = false>
struct ShortTile {
  static constexpr int kBM = kBM_, kBN = kBN_, kMT = kMT_, kNT = kNT_;
  static constexpr bool kRing = kRing_, kWgmma = kWgmma_;
  static constexpr int kWarpsM = kBM / (16 * kMT);
  static constexpr int kThreads = kWarpsM * kBN / (8 * kNT) * kWarp;
  static constexpr int kStage = (kBM + (kRing ? 2 : 1) * kBN) * kLine;
  static constexpr int kFitting = kSmemEverywhere / kStage;
  static constexpr int kMostSteps = kFitting < kShortSteps ? kFitting : kShortSteps;
};

// Rotates the rows from t on that are this block's of those that have its rows.
template <class Tile>
__device__ inline void rotate_share(const ShortProduct& job, int g, int t, int rows, int share) {
  constexpr int kBatch = Tile::kBN >= 64 ? 4 : 1;
  const Product& p = job.p;
  if (job.rotation.R == 0) return;
  Bf16* y = static_cast<Bf16*>(p.y) + t * job.y_row + g * job.y_group + p.O;
  rotate_rows<Tile::kThreads / kWarp, kBatch>(
      job.rotation, p.x + t * p.x_row + g * p.x_group + p.I, p.x_row, y, job.y_row, t, rows, share,
      ceil_div(p.O, Tile::kBM));
}

// Appends the rows of the first blocks, a warp each.
template <class Tile>
__device__ inline void append_rows(const MlaAppendParams& p) {
  const int block = blockIdx.y * gridDim.x + blockIdx.x;
  const int t = block * (Tile::kThreads / kWarp) + threadIdx.x / kWarp;
  if (t < p.T) append_row(p, t);
}

// sum += a step's weights times its rows, once all copies are here. o, row: the warp's first
template <class Tile>
__device__ inline void multiply_step(uint32_t weights, uint32_t rows, int o, int row,
                                     Sums<Tile::kMT, Tile::kNT>& sum) {
  if constexpr (Tile::kWgmma) {
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kLine; i += 32)
      wgmma(sum[0], wgmma_operand(weights + o / 64 * 64 * kLine + i), wgmma_operand(rows + i));
    wgmma_commit();
    wgmma_wait<0>();
  } else {
    multiply(weights + o * kLine, rows + row * kLine, sum);
  }
}

// Where steps of rows and of weights stand in shared memory, in bytes.
template <class Tile>
struct Stages {
  static constexpr int kMost = Tile::kMostSteps, kRows = Tile::kBN * kLine;
  int steps;
  // A ring's steps are as many at any I: its waits count them.
  __device__ explicit Stages(int I) : steps(Tile::kRing ? kMost : ceil_div(I, kStep)) {}
  __device__ int rows(int s, int half) const { return (half * steps + s) * kRows; }
  __device__ int weights(int s) const {
    return (Tile::kRing ? 2 : 1) * steps * kRows + s * Tile::kBM * kLine;
  }
};

// What a block does: rows t to end, one tile after the other, of a group's outputs from o on.
// share: which of the blocks it is that have its rows
struct Place {
  int g, share, o, t, end;
  __device__ Place(const ShortProduct& job, int bm, int bn)
      : g(static_cast<int>(blockIdx.y) - job.append_blocks),
        share(blockIdx.x / job.p.n_tiles),
        o(share * bm),
        t(blockIdx.x % job.p.n_tiles * job.row_tiles * bn),
        end(min(job.p.T, t + job.row_tiles * bn)) {}
};

// A step of the rows from t on.
template <class Tile, bool kVectors>
__device__ inline void load_x(const Product& p, int g, char* to, int s, int t) {
  load_rows<kVectors, Tile::kBN, Tile::kThreads>(to, p.x + g * p.x_group + t * p.x_row, p.x_row,
                                                 p.T - t, s * kStep, p.I);
}

// All steps of the weights and of the first rows, a group of copies each.
template <class Tile, bool kVectors>
__device__ inline void load_first(const Product& p, const Place& at, const Stages<Tile>& stages,
                                  char* smem) {
  const Bf16* w = static_cast<const Bf16*>(p.w) + (int64_t{at.g} * p.O + at.o) * p.I;
#pragma unroll 1
  for (int s = 0; s < Tile::kMostSteps; ++s) {
    if (s < stages.steps) {
      load_rows<kVectors, Tile::kBM, Tile::kThreads>(smem + stages.weights(s), w, p.I, p.O - at.o,
                                                     s * kStep, p.I);
      load_x<Tile, kVectors>(p, at.g, smem + stages.rows(s, 0), s, at.t);
    }
    copy_commit();
  }
}

template <class Tile, bool kVectors>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kWgmma ? 2 : 1)
    short_product_kernel(const __grid_constant__ ShortProduct job) {
  extern __shared__ __align__(1024) char boxes[];
  const Product& p = job.p;
  const Place at(job, Tile::kBM, Tile::kBN);
  let_next_begin();
  wait_for_previous();
  if (at.g < 0) return append_rows<Tile>(job.append);
  const Stages<Tile> stages(p.I);
  load_first<Tile, kVectors>(p, at, stages, boxes);
  rotate_share<Tile>(job, at.g, at.t, at.end - at.t, at.share);

  const uint32_t smem = shared_address(boxes);
  const int warp = threadIdx.x / kWarp;
  const int o = warp % Tile::kWarpsM * 16 * Tile::kMT, row = warp / Tile::kWarpsM * 8 * Tile::kNT;
  int half = 0;
#pragma unroll 1
  for (int t = at.t; t < at.end; t += Tile::kBN, half ^= 1) {
    const uint32_t padded = padded_rows<Tile::kNT>(job, t + row);
    const int next = t + Tile::kBN;
    Sums<Tile::kMT, Tile::kNT> sum;
    clear(sum);
#pragma unroll 1
    for (int s = 0; s < stages.steps; ++s) {
      copy_wait<Tile::kMostSteps - 1>();
      if (Tile::kWgmma) fence_products();
      __syncthreads();  // everybody's copies of this step are here, the tile before has been read
      if (Tile::kRing && next < at.end)
        load_x<Tile, kVectors>(p, at.g, boxes + stages.rows(s, half ^ 1), s, next);
      copy_commit();
      multiply_step<Tile>(smem + stages.weights(s), smem + stages.rows(s, half), o, row, sum);
    }
    store_tile(job, at.g, sum, at.o + o, t + row, padded);
  }
}

template <class Tile>
void launch_short(ShortProduct job, Stream stream) {
  Product& p = job.p;
  const int o_tiles = ceil_div(p.O, Tile::kBM), row_tiles = ceil_div(p.T, Tile::kBN);
  p.n_tiles = row_tiles, job.row_tiles = 1;
  int steps = ceil_div(p.I, kStep);
  if (Tile::kRing) {  // as many blocks as are resident at once
    steps = Tile::kMostSteps;
    const int64_t blocks = max(int64_t{1}, 2 * processors() / (int64_t{o_tiles} * p.G));
    job.row_tiles = ceil_div(row_tiles, static_cast<int>(min(blocks, int64_t{row_tiles})));
    p.n_tiles = ceil_div(row_tiles, job.row_tiles);
  }
  const int x = o_tiles * p.n_tiles, warps = Tile::kThreads / kWarp;
  job.append_blocks = ceil_div(ceil_div(job.append.T, warps), x);
  constexpr int kMost = Tile::kMostSteps * Tile::kStage;
  const Grid grid{.blocks = dim3(x, p.G + job.append_blocks),
                  .threads = Tile::kThreads,
                  .smem = smem_up_to<kMost>(steps * Tile::kStage),
                  .early = true};
  dispatch(in_vectors(p), [&](auto v) { launch(short_product_kernel<Tile, v>, grid, stream, job); });
}

inline void short_product(ShortProduct job, Stream stream) {
  const Product& p = job.p;
  using Many = ShortTile<128, 128, 4, 4, true>;
  using ManySm90 = ShortTile<128, 128, 1, 16, true, true>;
  job.wide = p.y_dtype == DType::bf16 && p.O % 8 == 0 && aligned<Bf16>(p.y, job.y_row) &&
             aligned<Bf16>(p.y, job.y_group);
  if (p.T <= 8)
    launch_short<ShortTile<32, 8, 1, 1>>(job, stream);
  else if (p.T <= 16)
    launch_short<ShortTile<32, 16, 1, 2>>(job, stream);
  else if (p.T <= 32)
    launch_short<ShortTile<32, 32, 1, 4>>(job, stream);
  else if (p.T > 64 && p.I <= Many::kMostSteps * kStep)
    device_has_wgmma() ? launch_short<ManySm90>(job, stream) : launch_short<Many>(job, stream);
  else if (p.I <= ShortTile<64, 64, 2, 4>::kMostSteps * kStep)
    launch_short<ShortTile<64, 64, 2, 4>>(job, stream);
  else
    launch_short<ShortTile<32, 64, 1, 4>>(job, stream);
}

}  // namespace kdtree::cuda
