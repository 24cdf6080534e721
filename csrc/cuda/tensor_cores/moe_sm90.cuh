// What the blocks of moe_experts_sm90.cu share, and the warpgroup of each that copies.
#pragma once

#include "barrier.cuh"
#include "int4_tile.cuh"
#include "moe_experts_int4.cuh"
#include "moe_plan.cuh"
#include "wgmma.cuh"

namespace kdtree::cuda::moe_sm90 {

using bf16 = __nv_bfloat16;

inline constexpr int kGroupThreads = 4 * kWarp;     // of a warpgroup
inline constexpr int kReaders = 3 * kGroupThreads;  // threads that multiply
inline constexpr int kThreads = kReaders + kGroupThreads;
inline constexpr int kWarps = kReaders / kWarp;
inline constexpr int kRowTiles =
    7;  // of 8 rows, that a block multiplies by: registers hold no more
inline constexpr int kBlockRows = kRowTiles * kRows;

inline constexpr int kDepth = 2;                              // tiles of a stage
inline constexpr int kVector = 8;                             // bf16 of 16 bytes
inline constexpr int kChunks = kDepth * kInt4Tile / kVector;  // of a row: a line of 128 bytes

struct alignas(1024) Stage {     // as swizzled lines want it
  uint4 x[kBlockRows][kChunks];  // chunk c of row r in place c ^ r % 8
  uint4 code[kWarps][kDepth][kWarp];
  bf16 scale[kWarps][kDepth][kInt4Tile];
};
static_assert(sizeof(Stage::x) % 1024 == 0);

struct Params {
  CUtensorMap code, scale;  // [matrices, tile rows, tiles, a tile's]
  MoeExpertsParams p;
};

// What all threads of a block know of a kernel.
template <bool kHidden>
struct Job {
  static constexpr int kEach = kHidden ? kWarps / 2 : kWarps;  // tile rows, of the gate and of up
  static constexpr int kStages = kHidden ? 6 : 10;
  using Stages = Ring<kStages>;
  struct Smem {
    Stage stage[kStages];
    float4 total[kHidden ? 2 * kRowTiles : 1][kReaders];  // of hidden's runs
    uint64_t barrier[3 * kStages];
  };

  const MoeExpertsParams& p;
  Smem& smem;
  const MoePlan work;
  const int rows, tiles, places;

  __device__ Job(const MoeExpertsParams& p, Smem& smem)
      : p(p),
        smem(smem),
        work(made_plan(p)),
        rows((kHidden ? p.F : p.D) / kInt4Tile),
        tiles((kHidden ? p.D : p.F) / kInt4Tile),
        places(ceil_div(rows, kEach)) {}

  // Calls f(group, place) for the block's items, in their order. kAhead: a group is read before the
  // item ahead of it is done.
  template <bool kAhead, class F>
  __device__ void items(F f) const {
    const int count = work.groups * places, step = gridDim.x;
    int item = blockIdx.x;
    if (item >= count) return;
    for (uint2 next = kAhead ? group_of(item) : uint2{}; item < count; item += step) {
      const uint2 now = kAhead ? next : group_of(item);
      if (kAhead) next = group_of(min(item + step, count - 1));
      f(MoeGroup{static_cast<int>(now.x), static_cast<short>(now.y & 0xffff),
                 static_cast<short>(now.y >> 16)},
        item % places);
    }
  }
  __device__ uint2 group_of(int item) const {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(work.group + item / places));
    return v;
  }
  // Where a row's pair stands; beyond the last, the last.
  __device__ const int* pair_at(const MoeGroup& group, int row) const {
    return work.pair + group.first + min(row, group.count - 1);
  }

  // The barriers of a ring's stages whose copies have come: all threads that copy rows arrive, and the
  // one that commands the copy engine. The full ones tell that wgmma may read them.
  static __device__ Stages copied(const Stages& ring) {
    return {ring.at + Stages::kBytes, ring.slot, ring.parity};
  }
};

// A box of tiles, those of `matrix` and more from tile row `row` and tile `tile` on.
__device__ inline void copy_box(const void* to, const CUtensorMap& tensor, int tile, int row,
                                int matrix, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(&tensor), "r"(0), "r"(tile), "r"(row), "r"(matrix), "r"(barrier)
      : "memory");
}

// The warpgroup that fills the ring: one warp commands the copy engine, two copy rows, which are no
// box of a tensor, and one tells the readers.
template <bool kHidden>
struct Writer {
  using Work = Job<kHidden>;
  static constexpr int kCopyThreads = 2 * kWarp;
  static constexpr int kCopyRows = kCopyThreads / kChunks;  // rows that a pass takes
  static constexpr int kPasses = kBlockRows / kCopyRows;
  static_assert(kCopyRows == 8);  // so all rows of a thread are swizzled alike
  static constexpr int kBytes = sizeof(Stage::code) + sizeof(Stage::scale);

  const Params& params;
  const Work& job;
  typename Work::Stages ring;
  const int thread = threadIdx.x % kGroupThreads, warp = thread / kWarp;

  // By one thread, before the block's barrier.
  static __device__ void init(const typename Work::Stages& ring) {
    ring.init(kWarps);
    for (int s = 0; s < Work::kStages; ++s)
      Barrier::init(Work::copied(ring).at + 8 * s, kCopyThreads + 1);
  }

  __device__ void run() {
    if (warp < 2)
      job.template items<false>([&](const MoeGroup& group, int) { copy_rows(group); });
    else if (warp == 2 && thread % kWarp == 0)
      job.template items<false>(
          [&](const MoeGroup& group, int place) { copy_tiles(group, place); });
    else if (warp == 3)
      job.template items<false>([&](const MoeGroup&, int) { tell(); });
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  __device__ void copy_rows(const MoeGroup& group) {
    const auto& p = job.p;
    const int chunk = thread % kChunks, first = thread / kChunks;
    const auto* x = static_cast<const char*>(kHidden ? p.x : p.hidden);
    const uint32_t row_vectors = (kHidden ? p.x_stride : p.F) / kVector;
    uint32_t from[kPasses];  // in vectors
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const uint32_t pair = *job.pair_at(group, i * kCopyRows + first);
      from[i] = (kHidden ? pair / p.K : pair) * row_vectors + chunk;
    }
    const uint32_t to = shared_address(&job.smem.stage[0].x[first][chunk ^ first]);
    for (int t = 0; t < job.tiles; t += kDepth, ring.next()) {
      ring.wait_empty();
      if (chunk * kVector < (job.tiles - t) * kInt4Tile) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i)
          if (i * kCopyRows < group.count)
            copy_async(
                to + ring.slot * int{sizeof(Stage)} + i * int{sizeof(Stage::x[0])} * kCopyRows,
                x + uint64_t{from[i]} * sizeof(uint4));
      }
      x += kDepth * kInt4Tile * sizeof(bf16);
      asm volatile(
          "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(Work::copied(ring).full())
          : "memory");
    }
  }

  // All warps' tiles. Beyond the last tile row or tile there are zeros.
  __device__ void copy_tiles(const MoeGroup& group, int place) {
    const int matrix = kHidden ? 2 * group.expert : group.expert, row = place * Work::kEach;
#pragma unroll 1
    for (int t = 0; t < job.tiles; t += kDepth, ring.next()) {
      const auto copied = Work::copied(ring);
      const Stage& to = job.smem.stage[ring.slot];
      ring.wait_empty();
      copied.expect(kBytes);
      copy_box(to.code, params.code, t, row, matrix, copied.full());
      copy_box(to.scale, params.scale, t, row, matrix, copied.full());
    }
  }

  // wgmma sees what others copied only after a fence, which waits for all that its thread has begun:
  // so it is the fence of a warp that copies nothing.
  __device__ void tell() {
#pragma unroll 1
    for (int t = 0; t < job.tiles; t += kDepth, ring.next()) {
      Work::copied(ring).wait_full();
      fence_products();
      __syncwarp();
      if (thread % kWarp == 0) Barrier::arrive(ring.full());
    }
  }
};

}  // namespace kdtree::cuda::moe_sm90
