// The second half of moe_experts for one row of few hidden features.
//
//   y = sum over k in order of weights[k] * (down[ids[k]] h[k]), + shared
//
// Grid    a block a processor. It takes one work (one or two tile rows of 32 outputs) after another
//         and multiplies by all experts of the row, so that it can add them up. It begins beside the
//         kernel before, whose end finds its first weights in shared memory.
// Tiling  a warp multiplies a tile row of an expert: a run is all inputs.
// Smem    per warp a ring of 8 tiles, and the sums: 78 KB, which a processor has beside hidden's.
// Reads   down of a pair's expert, from HBM once; h, from L2, once a tile row.
// Floor   see moe_experts_int4.cu.
// Needs   packed weights and scales on 16 bytes; sm_90 or later.
#include <algorithm>

#include "moe_one.cuh"

namespace kdtree::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kWarps = 16;
constexpr int kDepth = 4;  // tiles of a stage
constexpr int kStages = 2;

struct Stage {
  uint4 code[kDepth][kWarp];
  bf16 scale[kDepth][kInt4Tile];
};

struct Smem {
  Stage stage[kWarps][kStages];
  float sum[kOneExperts][2 * kInt4Tile];  // [k][output of the work]
  float weight[kOneExperts];
  bool there[kOneExperts];
};

// The runs of `columns` tiles of one warp, from tile next() on until that is negative, copied
// kStages stages ahead.
template <class Next>
class Copies {
 public:
  __device__ Copies(Stage* stages, const void* w, const void* scale, int columns, const Next& next)
      : stages_(shared_address(stages)),
        w_(static_cast<const uint4*>(w)),
        s_(static_cast<const uint4*>(scale)),
        columns_(columns),
        next_(next) {
    begin();
#pragma unroll 1  // what runs once waits for its instructions
    for (int s = 0; s < kStages; ++s) pop();
  }
  __device__ uint32_t wait() const {  // for the next stage: its address
    copy_wait<kStages - 1>();
    __syncwarp();  // the other lanes' copies have come, too
    return stages_ + slot_ * int{sizeof(Stage)};
  }
  __device__ void pop() {  // gives it back; it is filled anew
    __syncwarp();          // all lanes have read it
    constexpr int kVector = sizeof(uint4), kChunks = sizeof(Stage::scale[0]) / kVector;
    const int lane = threadIdx.x % kWarp, n = min(left_, kDepth);
    const uint32_t to = stages_ + slot_ * int{sizeof(Stage)} + lane * kVector;
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (i < n)
        copy_async(to + i * int{sizeof(Stage::code[0])}, w_ + (int64_t{tile_ + i} * kWarp + lane));
    if (lane < n * kChunks)
      copy_async(to + int{offsetof(Stage, scale)}, s_ + (int64_t{tile_} * kChunks + lane));
    copy_commit();  // of nothing, at the end: what is awaited is counted
    tile_ += n, left_ -= n;
    slot_ = slot_ + 1 == kStages ? 0 : slot_ + 1;
    if (n > 0 && left_ == 0) begin();
  }

 private:
  __device__ void begin() {
    tile_ = next_();
    left_ = tile_ >= 0 ? columns_ : 0;
  }

  uint32_t stages_;
  const uint4 *w_, *s_;
  int columns_;
  const Next& next_;
  int tile_ = 0, left_ = 0, slot_ = 0;
};

// Eight tiles of h, of which a lane holds 16 bytes: lane 4 * i + t those that tile i's B fragments
// are in the lanes t.
constexpr int kAtOnce = 8;

// Those of `tiles` at h. It is no load of constants: another kernel may have written them since
// this one began.
__device__ uint4 load_hidden(const bf16* h, int tiles) {
  const int lane = threadIdx.x % kWarp, tile = min(lane / 4, tiles - 1);
  return load_now(reinterpret_cast<const uint4*>(h) + (tile * 4 + lane % 4));
}

// acc += the tile at `tile` times tile i of h.
__device__ void multiply(uint32_t tile, uint32_t scale0, uint32_t scale1, const uint4& h, int i,
                         float (&acc)[2][4]) {
  const int from = i * 4 + threadIdx.x % 4;
  const uint32_t b[4] = {__shfl_sync(~0u, h.x, from), __shfl_sync(~0u, h.y, from),
                         __shfl_sync(~0u, h.z, from), __shfl_sync(~0u, h.w, from)};
  Int4Tile(load_shared(tile + threadIdx.x % kWarp * int{sizeof(uint4)}), scale0, scale1)
      .multiply(b, acc);
}

// A tile row of an expert: of which work of the block (kTileRows tile rows), which of them.
struct Unit {
  int work, at;  // at: k * kTileRows + tile row
};

template <int kTileRows>
__global__ void __maxnreg__(kDownRegisters)
    down_kernel(const __grid_constant__ MoeExpertsParams p) {
  constexpr int kOutputs = kTileRows * kInt4Tile;
  auto& smem = shared_memory<Smem>();
  let_next_begin();
  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
  const int rows = p.D / kInt4Tile, tiles = p.F / kInt4Tile, units = p.K * kTileRows;
  const int works = ceil_div(rows, kTileRows);
  const auto row_of = [&](Unit u) { return u.work * kTileRows + u.at % kTileRows; };
  const auto there = [&](Unit u) {  // the first from u on with something to multiply
    while (u.work < works) {
      if (u.at >= units)
        u = {u.work + int(gridDim.x), warp};
      else if (row_of(u) < rows && one_expert(p, u.at / kTileRows) >= 0)
        break;
      else
        u.at += kWarps;
    }
    return u;
  };
  const auto next_of = [&](Unit u) { return there({u.work, u.at + kWarps}); };
  Unit copied = {int(blockIdx.x), warp};
  const auto next = [&] {
    const Unit u = there(copied);
    copied = {u.work, u.at + kWarps};
    return u.work < works ? (one_expert(p, u.at / kTileRows) * rows + row_of(u)) * tiles : -1;
  };
  Copies<decltype(next)> copies(smem.stage[warp], p.down, p.down_scale, tiles, next);

  const auto hidden_of = [&](Unit u) {  // beyond the last, any
    return static_cast<const bf16*>(p.hidden) + (u.work < works ? u.at / kTileRows * p.F : 0);
  };
  if (thread < p.K) {
    smem.there[thread] = one_expert(p, thread) >= 0;
    smem.weight[thread] = __ldg(p.weights + thread);
  }
  Unit unit = there({int(blockIdx.x), warp}), after = next_of(unit);
  const bf16* x = hidden_of(unit);
  wait_for_previous();  // for hidden
  uint4 h = load_hidden(x, tiles);
  for (int work = blockIdx.x; work < works; work += gridDim.x) {
    const int output = work * kOutputs + thread;
    const bool mine = thread < kOutputs && output < p.D;
    const float shared =
        mine && p.shared ? float(static_cast<const bf16*>(p.shared)[output]) : -0.0f;
    while (unit.work == work) {
      float acc[2][4] = {};
      uint32_t stage = 0, scale[4];
#pragma unroll 1
      for (int begin = 0; begin < tiles; begin += kAtOnce) {
        const int left = tiles - begin;
        x = left > kAtOnce ? x + kAtOnce * kInt4Tile : hidden_of(after);
        const uint4 ahead = load_hidden(x, left > kAtOnce ? left - kAtOnce : tiles);
#pragma unroll 1
        for (int i = 0; i < min(left, kAtOnce); i += 2) {
          if (i % kDepth == 0) stage = copies.wait();
          const uint32_t tile = stage + i % kDepth * int{sizeof(Stage::code[0])};
          load_scales(stage + int{offsetof(Stage, scale)} +
                          i % kDepth * int{sizeof(Stage::scale[0])},
                      scale);
          multiply(tile, scale[0], scale[1], h, i, acc);
          if (i + 1 < left)
            multiply(tile + int{sizeof(Stage::code[0])}, scale[2], scale[3], h, i + 1, acc);
          if (i % kDepth + 2 == kDepth || i + 2 >= left) copies.pop();
        }
        h = ahead;
      }
      if (lane % 4 == 0) {  // row 0
        float* to = &smem.sum[unit.at / kTileRows][unit.at % kTileRows * kInt4Tile + lane / 4];
#pragma unroll
        for (int q = 0; q < 4; ++q) to[8 * q] = acc[q / 2][q % 2 * 2] * kInt4Unit;
      }
      unit = after, after = next_of(unit);
    }
    __syncthreads();
    if (mine) {
      float sum = 0;
      for (int k = 0; k < p.K; ++k)
        if (smem.there[k]) sum = fmaf(smem.weight[k], smem.sum[k][thread], sum);
      if (p.shared) sum += shared;
      static_cast<bf16*>(p.y)[output] = bf16(sum);
    }
    __syncthreads();  // all have read the sums
  }
}

static_assert(kAtOnce % kDepth == 0);

template <int kTileRows>
void launch_down(const MoeExpertsParams& p, Stream stream) {
  const int works = ceil_div(p.D / kInt4Tile, kTileRows);
  const unsigned blocks = std::min(works, moe_processors());
  const Grid grid{.blocks = blocks,
                  .threads = kWarps * kWarp,
                  .smem = smem_up_to<sizeof(Smem)>(),
                  .early = true};
  launch(down_kernel<kTileRows>, grid, stream, p);
}

}  // namespace

void moe_down_one(const MoeExpertsParams& p, Stream stream) {
  p.D / kInt4Tile > moe_processors() ? launch_down<2>(p, stream) : launch_down<1>(p, stream);
}

}  // namespace kdtree::cuda
