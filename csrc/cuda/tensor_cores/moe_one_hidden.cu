// The first half of moe_experts for one row of few hidden features: h, of INT4 gate and up.
//
//   h[k] = silu(gate[ids[k]] x) * (up[ids[k]] x), rounded to bf16
//
// Grid    clusters of two blocks, one block a processor; a cluster takes one item (expert, tile row
//         of 32 outputs) after another.
// Tiling  two warps share a run of the gate or of up, four of each to a block: one multiplies the
//         first 16 outputs, one the others. The runs' sums meet in shared memory, in each block
//         those of the outputs that it finishes.
// Smem    per run a ring of 28 tiles (16 KB) that the copy engine fills, 4 KB at a time; the row:
//         150 KB. So all weights of D = 7168, F = 256 are on their way at once.
// Reads   the experts' gate and up once; the row, from L2, once a block.
// Floor   see moe_experts_int4.cu.
// Needs   packed weights, scales and the row on 16 bytes; sm_90 or later.
#include "moe_one.cuh"

namespace kdtree::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRings = kWarps / 2;
constexpr int kRuns = kRings / 2;  // of each matrix
constexpr int kDepth = 7;          // tiles of a stage
constexpr int kStages = 4;
constexpr int kCluster = 2;
constexpr int R = kRuns * kCluster;          // runs of a hidden output
constexpr int kHalf = kInt4Tile / kCluster;  // outputs of a warp, and those that a block finishes

struct Stage {
  uint4 code[kDepth][kWarp];
  bf16 scale[kDepth + 1][kInt4Tile];  // they are loaded for two tiles at a time
};

struct Smem {
  Stage stage[kRings][kStages];
  alignas(16) bf16 x[kOneInputs];
  float exchange[2][2][R][kHalf];  // [turn][gate, up][run]
  uint64_t full[kRings][kStages], empty[kRings][kStages];
  uint64_t meeting[2];  // [turn]
};

// The runs of `columns` tiles of two warps, from tile next() on until that is negative, by the copy
// engine, kStages stages ahead. One of their lanes fills it.
template <class Next>
class Ring {
 public:
  __device__ Ring(Stage* stages, uint64_t* full, uint64_t* empty, const void* w, const void* scale,
                  int columns, bool fills, const Next& next)
      : stages_(shared_address(stages)),
        full_(shared_address(full)),
        empty_(shared_address(empty)),
        w_(static_cast<const uint4*>(w)),
        s_(static_cast<const bf16*>(scale)),
        columns_(columns),
        fills_(fills),
        next_(next) {
    if (!fills_) return;
    for (int s = 0; s < kStages; ++s) {
      Barrier::init(full_ + 8 * s, 1);
      Barrier::init(empty_ + 8 * s, 2);
    }
    Barrier::fence_init();
#pragma unroll 1  // what runs once waits for its instructions
    for (int s = 0; s < kStages; ++s) fill(s);
  }
  // The next stage's address.
  __device__ uint32_t wait() const {
    Barrier::wait(full_ + 8 * slot_, parity_);
    return stages_ + slot_ * int{sizeof(Stage)};
  }
  // Gives it back; it is filled anew.
  __device__ void pop() {
    __syncwarp();  // all lanes have read it
    if (threadIdx.x % kWarp == 0) Barrier::arrive(empty_ + 8 * slot_);
    if (fills_ && tile_ >= 0) {
      Barrier::wait(empty_ + 8 * slot_, parity_);
      fill(slot_);
    }
    if (++slot_ == kStages) slot_ = 0, parity_ ^= 1;
  }

 private:
  __device__ void fill(int slot) {
    if (left_ == 0) {
      if (tile_ >= 0) tile_ = next_();
      if (tile_ < 0) return;
      left_ = columns_;
    }
    const int n = min(left_, kDepth);
    const uint32_t full = full_ + 8 * slot, to = stages_ + slot * int{sizeof(Stage)};
    constexpr int kCodes = sizeof(Stage::code[0]), kScales = sizeof(Stage::scale[0]);
    Barrier::expect(full, n * (kCodes + kScales));
    copy_bulk(to, w_ + int64_t{tile_} * kWarp, n * kCodes, full);
    copy_bulk(to + int{offsetof(Stage, scale)}, s_ + int64_t{tile_} * kInt4Tile, n * kScales, full);
    tile_ += n, left_ -= n;
  }
  static __device__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t full) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to), "l"(from), "r"(bytes), "r"(full)
        : "memory");
  }

  uint32_t stages_, full_, empty_;
  const uint4* w_;
  const bf16* s_;
  int columns_;
  bool fills_;
  const Next& next_;
  int tile_ = 0, left_ = 0, slot_ = 0;
  uint32_t parity_ = 0;
};

// acc += 16 outputs (a lane's two words of a tile) times the rows b.
__device__ void multiply_half(uint2 code, const uint32_t (&b)[4], uint32_t scale,
                              float (&acc)[4]) {
  uint32_t a[2][4];
  int4_parts(code.x, a[0]), int4_parts(code.y, a[1]);
  float half[4], c[4];
  mma(half, a[0], b[0], b[1], {0, 0, 0, 0});
  mma(c, a[1], b[2], b[3], half);
  const float low = __uint_as_float(scale << 16), high = __uint_as_float(scale & 0xffff0000);
#pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] = fmaf(i < 2 ? low : high, c[i], acc[i]);
}

// acc += the tiles of a stage, of one half of the outputs, times the row whose inputs stand at x.
__device__ void multiply_stage(uint32_t stage, int tiles, int half, uint32_t x, float (&acc)[4]) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t code = stage + lane * int{sizeof(uint4)} + half * int{sizeof(uint2)};
  const uint32_t scales = stage + int{offsetof(Stage, scale)} +
                          lane / 8 % 2 * int{sizeof(Stage::scale[0])} + half * 32 + lane % 2 * 16;
  x += lane / 8 * int{sizeof(uint4)};  // for every row of B
  const auto multiply = [&](int i, uint32_t scale) {
    uint32_t b[4];
    load_fragments(x + i * kInt4Tile * int{sizeof(bf16)}, b);
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "r"(code + i * int{sizeof(Stage::code[0])})
                 : "memory");
    multiply_half(v, b, scale, acc);
  };
  uint32_t scale[2];
  int i = 0;
#pragma unroll 1
  for (; i + 1 < tiles; i += 2) {
    load_transposed(scales + i * int{sizeof(Stage::scale[0])}, scale);
    multiply(i, scale[0]);
    multiply(i + 1, scale[1]);
  }
  if (i < tiles) {
    load_transposed(scales + i * int{sizeof(Stage::scale[0])}, scale);
    multiply(i, scale[0]);
  }
}

__global__ void __maxnreg__(kHiddenRegisters)
    hidden_kernel(const __grid_constant__ MoeExpertsParams p) {
  auto& smem = shared_memory<Smem>();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, rank = cluster_rank();
  const int rows = p.F / kInt4Tile, tiles = p.D / kInt4Tile, pairs = p.T * p.K;
  const int items = pairs * rows, step = gridDim.x / kCluster;
  const auto expect = [&](int turn) {  // by one thread: the runs' sums
    Barrier::expect(shared_address(&smem.meeting[turn]), sizeof(smem.exchange[0]));
  };
  if (threadIdx.x == 0) {
    for (auto& meeting : smem.meeting) Barrier::init(shared_address(&meeting), 1);
    Barrier::fence_init();
  }
  cluster_arrive();
  wait_for_previous();
  const auto there = [&](int item) {  // the first from `item` on of a present expert
    while (item < items && one_expert(p, item % pairs) < 0) item += step;
    return item;
  };
  // The row goes before the weights, for which it would have to wait.
  constexpr int kVector = sizeof(uint4) / sizeof(bf16);
  for (int i = threadIdx.x; i < p.D / kVector; i += kThreads)
    copy_async(&smem.x[i * kVector], static_cast<const bf16*>(p.x) + i * kVector);
  copy_commit();
  int item = there(blockIdx.x / kCluster);

  const int ring_of = warp / 2, half = warp % 2;
  const int matrix = ring_of / kRuns, run = rank * kRuns + ring_of % kRuns;
  const int length = ceil_div(tiles, R), begin = min(run * length, tiles),
            count = min(length, tiles - begin);
  int copied = item;
  const auto next = [&] {
    const int item = there(copied);
    if (count == 0 || item >= items) return -1;
    copied = item + step;
    return ((2 * one_expert(p, item % pairs) + matrix) * rows + item / pairs) * tiles + begin;
  };
  Ring<decltype(next)> ring(smem.stage[ring_of], smem.full[ring_of], smem.empty[ring_of], p.gate_up,
                            p.gate_up_scale, count, half == 0 && lane == 0, next);
  copy_wait<0>();
  __syncthreads();
  if (threadIdx.x == 0) expect(0), expect(1);
  cluster_wait();  // the other's barriers are there

  for (int n = 0; item < items; ++n) {
    const int turn = n % 2, after = there(item + step);
    float acc[4] = {};
    uint32_t x = shared_address(&smem.x[begin * kInt4Tile]);
#pragma unroll 1
    for (int left = count; left > 0; left -= kDepth) {
      const uint32_t stage = ring.wait();
      if (n == 0 && left == count) let_next_begin();  // whose weights are to come after these
      multiply_stage(stage, min(left, kDepth), half, x, acc);
      ring.pop();
      x += kDepth * kInt4Tile * int{sizeof(bf16)};
    }
    if (lane % 4 == 0) {  // outputs g and g + 8 of this half, which block `half` finishes
      const float* to = &smem.exchange[turn][matrix][run][lane / 4];
      store_async(to, &smem.meeting[turn], half, acc[0]);
      store_async(to + 8, &smem.meeting[turn], half, acc[2]);
    }
    Barrier::wait_for_cluster(shared_address(&smem.meeting[turn]), n / 2 % 2);
    if (threadIdx.x == 0) expect(turn);
    if (threadIdx.x < kHalf) {
      float gate = 0, up = 0;
#pragma unroll
      for (int i = 0; i < R; ++i) {
        gate += smem.exchange[turn][0][i][threadIdx.x];
        up += smem.exchange[turn][1][i][threadIdx.x];
      }
      static_cast<bf16*>(p.hidden)[int64_t{item % pairs} * p.F + item / pairs * kInt4Tile +
                                   lane_place(rank * kHalf + threadIdx.x)] =
          gated(gate, up);
    }
    item = after;
  }
}

}  // namespace

void moe_hidden_one(const MoeExpertsParams& p, Stream stream) {
  static_assert(R == 2 * kMoeRuns);  // moe_hidden_runs, of a cluster of two
  const int items = p.K * (p.F / kInt4Tile), most = moe_processors() / kCluster;
  const auto clusters = static_cast<unsigned>(items < most ? items : most);
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(hidden_kernel),
                             cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared));  // the next kernel's is beside it
  launch(hidden_kernel,
         {.blocks = clusters * kCluster,
          .threads = kThreads,
          .smem = smem_up_to<sizeof(Smem), kSmemSm90>(),
          .cluster = kCluster,
          .early = true},
         stream, p);
}

}  // namespace kdtree::cuda
