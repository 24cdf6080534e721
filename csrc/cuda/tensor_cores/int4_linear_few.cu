// Product of up to 16 bf16 rows and few INT4 weights by mma.sync, for sm_90a.
//
// The same sums as int4_linear_mma's.
//
// Grid    x: a block a tile row, a warp each of its runs (product.cuh): no cluster has to meet. The
//         kernel begins early; an SM has room for two blocks, their even share.
// Tiling  steps of kTiles tiles of every run, kStages of them in shared memory, brought by the copy
//         engine at the command of a warp of its own, four copies a step: the runs are a dimension
//         of the tensors.
// Smem    the stages and their barriers; in the same place the runs' sums.
// Reads   weights once, x once per 32 outputs (from L2).
// Floor   O * I * (1/2 + 1/16) bytes: 8192 -> 7168 is 33 MB, 7.5 us at 4.4 TB/s (H200). A tile is
//         some 76 instructions of a warp.
// Needs   w, x, its rows and the scales on 16 bytes, runs of equal length.
#include "int4_product.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace kdtree::cuda {
namespace {

inline constexpr int kBN = 16, kNT = kBN / 8;
inline constexpr int kTiles = 4, kStages = 3;
inline constexpr int kTileBytes = kInt4Words * 4, kTileScales = kInt4Tile * 2;
inline constexpr int kBoxTiles = 2, kBoxes = kTiles / kBoxTiles;  // of rows of x
inline constexpr int kBoxLine = kBoxTiles * kInt4Tile * 2, kBox = kBN * kBoxLine;
static_assert(kRunStep % (kTiles * kInt4Tile) == 0, "a run is whole steps");

// Of a run, bytes of a stage: rows of x, tiles, their scales; and of its sums.
inline constexpr int kRows = kBoxes * kBox, kWords = kTiles * kTileBytes;
inline constexpr int kScales = kTiles * kTileScales, kStage = kRows + kWords + kScales;
inline constexpr int kSums = kSumsBytes<kInt4Tile, kBN>;
static_assert(kSums <= kStages * kStage);

constexpr int smem_of(int runs) { return kStages * runs * kStage + Ring<kStages>::kBytes; }

struct Int4FewProduct {
  CUtensorMap w, scale;  // [tile rows, runs, tiles, words], [tile rows, runs, tiles, outputs]
  CUtensorMap x;         // [runs, T, inputs]
  Product p;
};

// Where the stages lie: rows of x on 1024 bytes, the rest on 128.
struct Int4Stages {
  uint32_t rows, words, scales, barriers;

  __device__ Int4Stages(uint32_t smem, int runs)
      : rows(smem),
        words(rows + kStages * runs * kRows),
        scales(words + kStages * runs * kWords),
        barriers(scales + kStages * runs * kScales) {}
};

// Brings the steps from `begin` on to the ring's next stages, by one thread.
__device__ void fill_stages(const Int4FewProduct& job, const Int4Stages& at, Ring<kStages>& ring,
                            int begin, int end) {
  const int runs = job.p.runs, tile_row = blockIdx.x;
#pragma unroll 1
  for (int s = begin; s < end; ++s, ring.next()) {
    ring.wait_empty();
    ring.expect(runs * kStage);
    const int slot = ring.slot * runs, tile = s * kTiles;
    tensor_copy(at.words + slot * kWords, job.w, 0, tile, 0, tile_row, ring.full());
    tensor_copy(at.scales + slot * kScales, job.scale, 0, tile, 0, tile_row, ring.full());
#pragma unroll
    for (int b = 0; b < kBoxes; ++b)
      tensor_copy(at.rows + slot * kRows + b * runs * kBox, job.x,
                  (tile + b * kBoxTiles) * kInt4Tile, 0, 0, ring.full());
  }
}

// sum = this warp's run.
__device__ void multiply_run(const Int4Stages& at, Ring<kStages> ring, int run, int runs,
                             int steps, Sums<2, kNT>& sum) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t words = at.words + run * kWords + lane * 16;
  const uint32_t scales = at.scales + run * kScales + scales_of_lane<kTileScales>();
  // A lane's matrix row in a box, of its first and, as it is swizzled, of its second tile.
  const int r = lane % 8, chunk = lane / 8 ^ r;
  const uint32_t rows = at.rows + run * kBox + r * kBoxLine;
  const int first = chunk * 16, second = (chunk ^ 4) * 16;
#pragma unroll 1
  for (int s = 0; s < steps; ++s, ring.next()) {
    ring.wait_full();
    const int slot = ring.slot * runs;
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
      const uint32_t w = words + slot * kWords + b * kBoxTiles * kTileBytes;
      const uint32_t x = rows + slot * kRows + b * runs * kBox;
      uint32_t scale[4];
      load_transposed(scales + slot * kScales + b * kBoxTiles * kTileScales, scale);
      multiply_tile<kBoxLine>(load_shared(w), x + first, {scale[0], scale[1]}, sum);
      multiply_tile<kBoxLine>(load_shared(w + kTileBytes), x + second, {scale[2], scale[3]}, sum);
    }
    __syncwarp();
    if (lane == 0) Barrier::arrive(ring.empty());
  }
}

// Adds the runs' sums, which stand one after the other, and stores them as outputs.
__device__ void store_outputs(const Product& p, const char* sums) {
  constexpr int kQuads = kInt4Tile / 4;
  for (int i = threadIdx.x; i < p.T * kQuads; i += blockDim.x) {
    const int row = i / kQuads, o = i % kQuads * 4;
    float v[kMaxRuns][4];
#pragma unroll
    for (int run = 0; run < kMaxRuns; ++run)
      if (run < p.runs)
        load<true>(reinterpret_cast<const float*>(sums + run * kSums) + row * kPitch<kInt4Tile> + o,
                   4, v[run]);
    add_tree(v, p.runs);
    const int64_t at = int64_t{row} * p.O + blockIdx.x * kInt4Tile + o;
    store<true>(static_cast<Bf16*>(p.y) + at, 4, v[0]);
  }
}

__global__ void __launch_bounds__((kMaxRuns + 1) * kWarp, 1)
    int4_linear_few_kernel(const __grid_constant__ Int4FewProduct job) {
  extern __shared__ __align__(1024) char boxes[];
  const Product& p = job.p;
  const int warp = threadIdx.x / kWarp, steps = p.run / (kTiles * kInt4Tile);
  const bool fills = threadIdx.x == p.runs * kWarp;
  const Int4Stages at(shared_address(boxes), p.runs);
  wait_for_previous();
  Ring<kStages> ring{at.barriers};
  if (fills) {  // the first steps need not wait for the block
    ring.init(p.runs);
    fill_stages(job, at, ring, 0, min(steps, kStages));
  } else if (threadIdx.x == 0) {
    tensor_ready(job.w), tensor_ready(job.scale), tensor_ready(job.x);
  }
  __syncthreads();
  Sums<2, kNT> sum;
  clear(sum);
  if (warp < p.runs)
    multiply_run(at, ring, warp, p.runs, steps, sum);
  else if (fills)
    fill_stages(job, at, ring, kStages, steps);
  let_next_begin();
  __syncthreads();  // all stages have been read
  if (warp < p.runs) {
    in_whole_codes(sum);
    store_sums<kInt4Tile, 16>(sum, reinterpret_cast<float*>(boxes + warp * kSums), 0, 0);
  }
  __syncthreads();
  store_outputs(p, boxes);
}

}  // namespace

bool int4_linear_few(Product p, Stream stream) {
  const Runs runs = runs_of(p.I, p.O);
  const int blocks = p.O / kInt4Tile;
  if (p.T > kBN || runs.count * runs.length != p.I || blocks > 2 * processors()) return false;
  p.run = runs.length, p.runs = runs.count;
  const uint64_t tiles = runs.length / kInt4Tile, tile_rows = blocks, n = runs.count;
  const uint64_t row = (p.T > 1 ? p.x_row : p.I) * sizeof(Bf16);
  const uint32_t all = runs.count, rows = kBN;
  Int4FewProduct job{.p = p};
  if (!describe_dense(job.w, CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, p.w,
                      {kInt4Words, tiles, n, tile_rows}, {kInt4Words, kTiles, all, 1}) ||
      !describe_dense(job.scale, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, p.scale,
                      {kInt4Tile, tiles, n, tile_rows}, {kInt4Tile, kTiles, all, 1}) ||
      !describe(job.x, {.at = p.x,
                        .sizes = {uint64_t(runs.length), uint64_t(p.T), n},
                        .strides = {row, runs.length * sizeof(Bf16)},
                        .box = {kBoxTiles * kInt4Tile, rows, all},
                        .swizzle = CU_TENSOR_MAP_SWIZZLE_128B}))
    return false;
  const Grid grid{.blocks = static_cast<unsigned>(blocks),
                  .threads = static_cast<unsigned>((runs.count + 1) * kWarp),
                  .smem = smem_up_to<smem_of(kMaxRuns), kSmemSm90>(smem_of(runs.count)),
                  .early = true};
  launch(int4_linear_few_kernel, grid, stream, job);
  return true;
}

}  // namespace kdtree::cuda
