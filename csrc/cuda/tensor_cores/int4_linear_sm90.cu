// Product of bf16 rows and INT4 weights by wgmma, for sm_90a and 16-byte rows and scales.
//
// The same sums as int4_linear_mma's: a group of 32 inputs begins at zero, then
// sum = fma(scale, group, sum).
//
// Grid    x: blocks of 4 tile rows x kBN rows, rows first, so that neighbours share weights in L2,
//         times the blocks of a cluster, a run each (product.cuh). The kernel begins early, an SM
//         having room for its share of blocks alone.
// Tiling  steps of kTiles tiles, kStages of them in shared memory, brought by the copy engine at the
//         command of one lane, of each warp in turn; a warp turns a tile's codes into two A
//         operands in registers, a warpgroup multiplies four tiles; while two products run, the
//         sums of two others are scaled and added.
// Smem    the stages and their barriers; in the same place the block's sums, which its cluster reads.
// Reads   weights once per kBN rows, x once per 128 outputs (from L2).
//         Past the inputs' end tiles, scales and rows are zeros, which change no sum.
// Floor   O * I * (1/2 + 1/16) bytes: 7168 -> 18432 is 74 MB, 17 us at 4.3 TB/s (H200). A tile is
//         some 70 instructions of a warp and one for each row.
// Needs   w, x, its rows and the scales on 16 bytes, I a multiple of 64.
#include "int4_product.cuh"
#include "int4_wgmma.cuh"
#include "tensor_map.cuh"

namespace kdtree::cuda {
namespace {

inline constexpr int kWarps = 4;  // a warpgroup
inline constexpr int kTileBytes = kInt4Words * 4, kTileScales = kInt4Tile * 2;
inline constexpr int kBoxTiles = 2, kBoxLine = kBoxTiles * kInt4Tile * 2;  // of rows of x

template <int kBN_, int kTiles_, int kStages_, int kBlocks_>
struct Int4WgmmaTile {
  static constexpr int kBM = kWarps * kInt4Tile, kBN = kBN_, kNT = kBN / 8;
  static constexpr int kTiles = kTiles_, kStages = kStages_, kLevels = 0;  // a run a block
  static constexpr int kBlocks = kBlocks_;                                 // of an SM
  static constexpr int kThreads = kWarps * kWarp;
  // Rows, tiles, scales and barriers of all stages; the first on 1024 bytes each.
  static constexpr int kRows = kBN * kBoxLine * kTiles / kBoxTiles;
  static constexpr int kWords = kWarps * kTiles * kTileBytes;
  static constexpr int kScales = kWarps * kTiles * kTileScales;
  static constexpr int kStage = kRows + kWords + kScales;
  static constexpr int kWordsAt = kStages * kRows, kScalesAt = kWordsAt + kStages * kWords;
  static constexpr int kAll = kStages * kStage;
  static constexpr int kBarriers = kAll > kSumsBytes<kBM, kBN> ? kAll : kSumsBytes<kBM, kBN>;
  static constexpr int kSmem = kBarriers + Ring<kStages>::kBytes;
};

struct Int4TensorProduct {
  CUtensorMap w, scale, x;  // [tile rows, tiles, words], [tile rows, tiles, outputs], [1, T, I]
  Product p;
};

// Brings a step to the ring's stage.
template <class Tile>
__device__ inline void fill_stage(const Int4TensorProduct& job, const Ring<Tile::kStages>& ring,
                                  uint32_t smem, int t0, int tile_row, int tile) {
  ring.expect(Tile::kStage);
  const uint32_t rows = smem + ring.slot * Tile::kRows;
  tensor_copy(smem + Tile::kWordsAt + ring.slot * Tile::kWords, job.w, 0, tile, tile_row,
              ring.full());
  tensor_copy(smem + Tile::kScalesAt + ring.slot * Tile::kScales, job.scale, 0, tile, tile_row,
              ring.full());
#pragma unroll
  for (int b = 0; b < Tile::kTiles / kBoxTiles; ++b)
    tensor_copy(rows + b * Tile::kBN * kBoxLine, job.x, (tile + b * kBoxTiles) * kInt4Tile, t0, 0,
                ring.full());
}

// Where a lane reads in a stage.
template <class Tile>
struct Int4Step {
  uint32_t words, scales, rows;

  // sum += its tiles, in order: two products run while the sums of others are added.
  __device__ void multiply(Sums<2, Tile::kNT>& sum) const {
    Int4Group<Tile::kNT> group[2];  // of outputs 0 .. 15 and 16 .. 31 of a tile
    uint32_t scale[2] = {}, next_scale[2];
#pragma unroll
    for (int n = 0; n < Tile::kTiles; ++n) {
      const uint4 tile = load_shared(words + n * kTileBytes);
      load_transposed(scales + n * kTileScales, next_scale);
      const uint64_t b = wgmma_operand(rows + n / kBoxTiles * Tile::kBN * kBoxLine +
                                       n % kBoxTiles * kInt4Tile * 2);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        Int4Codes codes(m ? tile.z : tile.x, m ? tile.w : tile.y);
        if (n > 0) {
          group[m].template wait<1>();
          group[m].add_to(sum[m], scale[m]);
        }
        group[m].begin(codes, b);
        scale[m] = next_scale[m];
      }
    }
    group[0].template wait<1>();
    group[0].add_to(sum[0], scale[0]);
    group[1].template wait<0>();
    group[1].add_to(sum[1], scale[1]);
  }
};

// sum = the block's run: `tiles` tiles from `first` on.
template <class Tile>
__device__ inline void multiply_run(const Int4TensorProduct& job, uint32_t smem, int t0,
                                    int tile_row, int first, int tiles,
                                    Sums<2, Tile::kNT>& sum) {
  constexpr int kTiles = Tile::kTiles, kStages = Tile::kStages;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  Ring<kStages> use{smem + Tile::kBarriers};
  if (threadIdx.x == 0) {
    Ring<kStages> fill = use;
    for (int s = 0; s < min(tiles, (kStages - 1) * kTiles); s += kTiles, fill.next())
      fill_stage<Tile>(job, fill, smem, t0, tile_row, first + s);
  }
  const uint32_t words = smem + Tile::kWordsAt + warp * kTiles * kTileBytes + lane * 16;
  const uint32_t scales = smem + Tile::kScalesAt + warp * kTiles * kTileScales +
                          scales_of_lane<kTileScales>();
  for (int s = 0; s < tiles; s += kTiles, use.next()) {
    const int ahead = s + (kStages - 1) * kTiles;
    if (lane == 0 && s / kTiles % kWarps == warp && ahead < tiles) {
      const Ring<kStages> fill = use.previous();
      fill.wait_empty();
      fill_stage<Tile>(job, fill, smem, t0, tile_row, first + ahead);
    }
    __syncwarp();
    use.wait_full();
    const Int4Step<Tile> step{words + use.slot * Tile::kWords, scales + use.slot * Tile::kScales,
                              smem + use.slot * Tile::kRows};
    step.multiply(sum);
    __syncwarp();
    if (lane == 0) Barrier::arrive(use.empty());
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    int4_linear_sm90_kernel(const __grid_constant__ Int4TensorProduct job) {
  constexpr int kBM = Tile::kBM, kBN = Tile::kBN;
  extern __shared__ __align__(1024) char boxes[];
  const Product& p = job.p;
  const int tile = blockIdx.x / cluster_blocks(), warp = threadIdx.x / kWarp;
  const int t0 = tile % p.n_tiles * kBN, o0 = tile / p.n_tiles * kBM;
  const int run_tiles = p.run / kInt4Tile, first = cluster_rank() * run_tiles;
  const int tiles = min(p.I / kInt4Tile - first, run_tiles);
  const uint32_t smem = shared_address(boxes);

  if (threadIdx.x == 0) {
    tensor_ready(job.w), tensor_ready(job.scale), tensor_ready(job.x);
    Ring<Tile::kStages>{smem + Tile::kBarriers}.init(kWarps);
  }
  __syncthreads();
  wait_for_previous();
  Sums<2, Tile::kNT> sum;
  clear(sum);
  multiply_run<Tile>(job, smem, t0, o0 / kInt4Tile, first, tiles, sum);
  let_next_begin();
  __syncthreads();  // all stages have been read
  float* sums = reinterpret_cast<float*>(boxes);
  in_whole_codes(sum);
  store_sums<kBM, 16>(sum, sums, warp * kInt4Tile, 0);
  store_tile<kBM, kBN, Tile::kThreads>(p, sums, 0, t0, o0);
}

template <class Tile>
bool launch_tile(Product p, Stream stream) {
  const Division d = divide<Tile>(p, kMaxRuns);
  const int smem = even_smem(d.blocks, Tile::kBlocks, Tile::kSmem, kSmemSm90);
  const Grid grid{.blocks = d.blocks,
                  .threads = Tile::kThreads,
                  .smem = smem_up_to<kSmemSm90, kSmemSm90>(smem),
                  .cluster = d.cluster,
                  .early = true};
  const uint64_t tiles = p.I / kInt4Tile, tile_rows = p.O / kInt4Tile;
  const uint64_t row = (p.T > 1 ? p.x_row : p.I) * sizeof(Bf16);
  Int4TensorProduct job{.p = p};
  if (!describe(job.w, {.at = p.w,
                        .sizes = {kInt4Words, tiles, tile_rows},
                        .strides = {kTileBytes, tiles * kTileBytes},
                        .box = {kInt4Words, Tile::kTiles, kWarps},
                        .type = CU_TENSOR_MAP_DATA_TYPE_UINT32}) ||
      !describe(job.scale, {.at = p.scale,
                            .sizes = {kInt4Tile, tiles, tile_rows},
                            .strides = {kTileScales, tiles * kTileScales},
                            .box = {kInt4Tile, Tile::kTiles, kWarps}}) ||
      !describe(job.x, {.at = p.x,
                        .sizes = {uint64_t(p.I), uint64_t(p.T), 1},
                        .strides = {row, row * p.T},
                        .box = {kBoxTiles * kInt4Tile, Tile::kBN, 1},
                        .swizzle = CU_TENSOR_MAP_SWIZZLE_128B}))
    return false;
  launch(int4_linear_sm90_kernel<Tile>, grid, stream, job);
  return true;
}

}  // namespace

bool int4_linear_sm90(const Product& p, Stream stream) {
  if (p.I % (kBoxTiles * kInt4Tile) != 0) return false;
  // Few blocks have long rings; of many, all are to be resident at once.
  const int64_t blocks = int64_t{ceil_div(p.O, kWarps * kInt4Tile)} * runs_of(p.I, p.O).count;
  const bool few = blocks * ceil_div(p.T, 64) <= 2 * processors();
  if (p.T <= 16) return !few && launch_tile<Int4WgmmaTile<16, 4, 2, 6>>(p, stream);
  if (p.T <= 32)
    return few ? launch_tile<Int4WgmmaTile<32, 4, 6, 2>>(p, stream)
               : launch_tile<Int4WgmmaTile<32, 4, 2, 5>>(p, stream);
  return few ? launch_tile<Int4WgmmaTile<64, 4, 4, 2>>(p, stream)
             : launch_tile<Int4WgmmaTile<64, 2, 5, 3>>(p, stream);
}

}  // namespace kdtree::cuda
