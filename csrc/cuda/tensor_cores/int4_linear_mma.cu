// Product of bf16 rows and INT4 weights by mma.sync.
//
// A group of 32 inputs: two mma of the exact integers code - 8 into a fragment that begins at zero,
// then sum = fma(scale, group, sum), so that the weight is exact and a scale costs one fma a sum.
//
// Grid    x: blocks of kWarps tile rows x kBN rows, rows first, so that neighbours share weights in
//         L2, times the blocks of a cluster, a run each (product.cuh). The kernel begins early, an
//         SM having room for its share of blocks alone.
// Tiling  steps of kTiles tiles, kStages of them in shared memory, filled by asynchronous copies: a
//         warp copies its own tile row, all warps the rows of x. A 16-byte load is four A fragments.
// Smem    the stages; in the same place the block's sums, which its cluster reads.
// Reads   weights once per kBN rows, x once per 32 * kWarps outputs (from L2).
// Floor   O * I * (1/2 + 1/16) bytes: 7168 -> 18432 is 74 MB, 17 us at 4.4 TB/s (H200). A tile is
//         some 62 instructions of a warp at 8 rows, and 13 more for each further 8 rows.
// Needs   w on 16 bytes; where x or the scales are not, elements are loaded one by one.
#include "int4_product.cuh"

namespace kdtree::cuda {
namespace {

inline constexpr int kTileBytes = kInt4Words * 4;
inline constexpr int kTileScales = kInt4Tile * 2;        // bytes
inline constexpr int kTileInputs = kInt4Tile * 2;        // bytes of a row of x

template <int kWarps_, int kBN_, int kTiles_, int kStages_, int kBlocks_>
struct Int4Tile {
  static constexpr int kTiles = kTiles_;  // of a tile row in a stage
  static_assert(kRunStep % (kTiles * kInt4Tile) == 0, "a run is whole steps");
  static constexpr int kLine = kTiles * kTileInputs + 16;  // of a row of x, to be in other banks
  static constexpr int kWarps = kWarps_, kBM = kWarps * kInt4Tile, kBN = kBN_, kNT = kBN / 8;
  static constexpr int kStages = kStages_, kLevels = 0;  // a run a block
  static constexpr int kBlocks = kBlocks_;               // of an SM
  static constexpr int kThreads = kWarps * kWarp;
  // In a stage: tiles, their scales, rows of x.
  static constexpr int kScales = kWarps * kTiles * kTileBytes;
  static constexpr int kRows = kScales + kWarps * kTiles * kTileScales;
  static constexpr int kStage = kRows + kBN * kLine, kAll = kStages * kStage;
  static constexpr int kSmem = kAll > kSumsBytes<kBM, kBN> ? kAll : kSumsBytes<kBM, kBN>;
};

// 16 bytes to shared memory.
template <bool kVectors>
__device__ inline void copy_chunk(char* to, const char* from) {
  if constexpr (kVectors) {
    copy_async(to, from);
  } else {
    Vec<Bf16> v;
#pragma unroll
    for (int e = 0; e < v.kSize; ++e) v.v[e] = reinterpret_cast<const Bf16*>(from)[e];
    *reinterpret_cast<Vec<Bf16>*>(to) = v;
  }
}

// What a thread copies of each step: of its warp's tile row, and of the rows of x.
template <class Tile, bool kVectors>
struct Source {
  static constexpr int kTiles = Tile::kTiles;
  static constexpr int kChunks = kTiles * kTileInputs / 16;  // of a row of x
  static constexpr int kPass = Tile::kThreads / kChunks;     // rows at a time

  const char *words, *scales, *x;
  int64_t x_pass;  // bytes
  bool any;        // whether the tile row exists
  int rows;

  __device__ Source(const Product& p, int t0, int tile_row, int first_tile) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, tiles = p.I / kInt4Tile;
    any = (tile_row + warp) * kInt4Tile < p.O;
    const int64_t tile = int64_t{any ? tile_row + warp : tile_row} * tiles + first_tile;
    words = static_cast<const char*>(p.w) + tile * kTileBytes + lane * 16;
    scales = static_cast<const char*>(p.scale) + tile * kTileScales + lane * 16;
    const int row = t0 + threadIdx.x / kChunks;
    x = reinterpret_cast<const char*>(p.x + row * p.x_row + first_tile * kInt4Tile) +
        threadIdx.x % kChunks * 16;
    x_pass = kPass * p.x_row * int64_t{sizeof(Bf16)};
    rows = p.T - t0 - static_cast<int>(threadIdx.x / kChunks);
  }

  // Copies the step's first `tiles` tiles and goes on to the next step.
  __device__ void load(char* stage, int tiles) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    char* own = stage + warp * kTiles * kTileBytes + lane * 16;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
      if (any && j < tiles) copy_async(own + j * kTileBytes, words + j * kTileBytes);
    if (any && lane < min(tiles, kTiles) * (kTileScales / 16))
      copy_chunk<kVectors>(stage + Tile::kScales + warp * kTiles * kTileScales + lane * 16, scales);
    const int row = threadIdx.x / kChunks, c = threadIdx.x % kChunks;
    char* to = stage + Tile::kRows + row * Tile::kLine + c * 16;
#pragma unroll
    for (int r = 0; r < Tile::kBN; r += kPass)
      if (r < rows && c < tiles * (kTileInputs / 16))
        if (Tile::kBN % kPass == 0 || r + row < Tile::kBN)
          copy_chunk<kVectors>(to + r * Tile::kLine, x + r / kPass * x_pass);
    words += kTiles * kTileBytes, scales += kTiles * kTileScales, x += kTiles * kTileInputs;
  }
};

template <class Tile, bool kVectors>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    int4_linear_mma_kernel(const __grid_constant__ Product p) {
  constexpr int kStages = Tile::kStages, kTiles = Tile::kTiles;
  extern __shared__ __align__(16) char smem[];
  wait_for_previous();
  const int tile = blockIdx.x / cluster_blocks(), warp = threadIdx.x / kWarp;
  const int t0 = tile % p.n_tiles * Tile::kBN, o0 = tile / p.n_tiles * Tile::kBM;
  const int run_tiles = p.run / kInt4Tile, first = cluster_rank() * run_tiles;
  const int tiles = min(p.I / kInt4Tile - first, run_tiles);

  Source<Tile, kVectors> source(p, t0, o0 / kInt4Tile, tiles > 0 ? first : 0);
  int fill = 0, use = 0;  // the stages to fill and to multiply next
  const auto load = [&](int at) {
    if (at < tiles) source.load(smem + fill * Tile::kStage, tiles - at);
    copy_commit();
    fill = fill + 1 == kStages ? 0 : fill + 1;
  };
  const Int4Lane<Tile::kLine> lane{smem + warp * kTiles * kTileBytes,
                             smem + Tile::kScales + warp * kTiles * kTileScales,
                             smem + Tile::kRows};
  Sums<2, Tile::kNT> sum;
  clear(sum);
  for (int s = 0; s < kStages - 1; ++s) load(s * kTiles);
  for (int s = 0; s < tiles; s += kTiles) {
    copy_wait<kStages - 2>();
    __syncthreads();  // everybody's copies are here, and the stage to fill has been read
    load(s + (kStages - 1) * kTiles);
    lane.template multiply<kTiles>(use * Tile::kStage, tiles - s, sum);
    use = use + 1 == kStages ? 0 : use + 1;
  }
  copy_wait<0>();
  let_next_begin();
  __syncthreads();
  float* sums = reinterpret_cast<float*>(smem);
  in_whole_codes(sum);
  store_sums<Tile::kBM, 16>(sum, sums, warp * kInt4Tile, 0);
  store_tile<Tile::kBM, Tile::kBN, Tile::kThreads>(p, sums, 0, t0, o0);
}

template <class Tile>
void launch_tile(Product p, Stream stream) {
  const Division d = divide<Tile>(p, kMaxRuns);
  const int smem = even_smem(d.blocks, Tile::kBlocks, Tile::kSmem, kSmemEverywhere);
  const Grid grid{.blocks = d.blocks,
                  .threads = Tile::kThreads,
                  .smem = smem_up_to<kSmemEverywhere>(smem),
                  .cluster = d.cluster,
                  .early = true};
  const bool vectors = aligned<Bf16>(p.x, p.x_row) && aligned<Bf16>(p.scale, 0);
  dispatch(vectors, [&](auto v) { launch(int4_linear_mma_kernel<Tile, v>, grid, stream, p); });
}

}  // namespace

void int4_linear_mma(const Product& p, Stream stream) {
  // Few blocks have long rings; of many, all are to be resident at once.
  const int64_t blocks = int64_t{ceil_div(p.O, 4 * kInt4Tile)} * runs_of(p.I, p.O).count;
  if (p.T <= 8)
    return blocks <= 2 * processors() ? launch_tile<Int4Tile<4, 8, 4, 4, 5>>(p, stream)
                                      : launch_tile<Int4Tile<4, 8, 4, 2, 5>>(p, stream);
  if (p.T <= 16) return launch_tile<Int4Tile<4, 16, 4, 3, 5>>(p, stream);
  launch_tile<Int4Tile<4, 32, 4, 4, 2>>(p, stream);  // 64 rows leave no registers
}

}  // namespace kdtree::cuda
