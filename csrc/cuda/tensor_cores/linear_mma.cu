// Product of bf16 rows and bf16 weights by mma.sync, for every alignment.
//
// Grid    x: tiles of kBM outputs x kBN rows, rows first, so that neighbours share weights in L2,
//         times the blocks of a cluster, which share the runs of a tile (product.cuh); y: groups.
// Tiling  steps of 64 inputs, kStages of them in shared memory, filled by asynchronous copies that
//         all threads issue; a warp multiplies 16 * kMT outputs by 8 * kNT rows.
// Smem    the stages; in the same place the block's sums, which its cluster reads.
// Reads   weights once per kBN rows, x once per kBM outputs (from L2).
// Floor   the weights' bytes: 7168 -> 18432 is 264 MB, 60 us at 4.4 TB/s (H200).
// Needs   nothing: where rows or weights are not made of 16-byte vectors, elements are loaded.
#include "linear.cuh"

namespace kdtree::cuda {
namespace {

inline constexpr int kStep = 64;         // inputs
inline constexpr int kLine = 2 * kStep;  // bytes of a row of a stage
inline constexpr int kChunk = 8;         // bf16 of 16 bytes
inline constexpr int kChunks = kStep / kChunk;

template <int kBM_, int kBN_, int kMT_, int kNT_, int kStages_>
struct MmaTile {
  static constexpr int kBM = kBM_, kBN = kBN_, kMT = kMT_, kNT = kNT_, kStages = kStages_;
  static constexpr int kLevels = kMostLevels;
  static constexpr int kWarpsM = kBM / (16 * kMT);
  static constexpr int kThreads = kWarpsM * kBN / (8 * kNT) * kWarp;
  static constexpr int kStage = (kBM + kBN) * kLine, kAll = kStages * kStage;
  static constexpr int kSmem = kAll > kSumsBytes<kBM, kBN> ? kAll : kSumsBytes<kBM, kBN>;
};

// Where chunk c of row r of a stage lies, in bytes: chunks c of eight rows are in different banks.
__device__ inline int chunk_at(int r, int c) { return r * kLine + ((c ^ (r & 7)) << 4); }

// 16 bytes to shared memory: the first `left` elements at p, then zeros.
template <bool kVectors>
__device__ inline void copy_chunk(char* to, const Bf16* p, int left) {
  if constexpr (kVectors) {
    copy_async(to, p, left > 0);
  } else {
    Vec<Bf16> v;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) v.v[e] = e < left ? p[e] : Bf16(0.0f);
    *reinterpret_cast<Vec<Bf16>*>(to) = v;
  }
}

// kRows rows of a stage to shared memory, from input i of I on; zeros for rows from `rows` on.
template <bool kVectors, int kRows, int kThreads>
__device__ inline void load_rows(char* to, const Bf16* from, int64_t stride, int rows, int i,
                                 int I) {
  constexpr int kPass = kThreads / kChunks;
  const int c = threadIdx.x % kChunks, first = threadIdx.x / kChunks, left = I - i - c * kChunk;
  const Bf16* p = from + first * stride + i + c * kChunk;
#pragma unroll
  for (int n = 0; n < ceil_div(kRows, kPass); ++n, p += kPass * stride) {
    const int r = n * kPass + first;
    if (kRows % kPass != 0 && r >= kRows) break;
    const bool any = r < rows && left > 0;
    copy_chunk<kVectors>(to + chunk_at(r, c), any ? p : from, any ? left : 0);
  }
}

// The B fragments of 8 * kNT rows for 16 inputs of a stage, from chunk c on.
template <int kNT>
__device__ inline void load_b(uint32_t rows, int c, uint32_t (&b)[kNT][2]) {
  const int lane = threadIdx.x % kWarp, r = lane % 8, chunk = c + lane / 8 % 2;
  if constexpr (kNT == 1) {
    load_matrices(rows + chunk_at(r, chunk), b[0]);
  } else {
#pragma unroll
    for (int n = 0; n < kNT; n += 2) {
      uint32_t two[4];
      load_matrices(rows + chunk_at(r + lane / 16 * 8 + 8 * n, chunk), two);
      b[n][0] = two[0], b[n][1] = two[1], b[n + 1][0] = two[2], b[n + 1][1] = two[3];
    }
  }
}

// sum += a step's weights times its rows
template <int kMT, int kNT>
__device__ inline void multiply(uint32_t weights, uint32_t rows, Sums<kMT, kNT>& sum) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int c = 0; c < kChunks; c += 2) {
    uint32_t a[kMT][4], b[kNT][2];
#pragma unroll
    for (int m = 0; m < kMT; ++m)
      load_matrices(weights + m * 16 * kLine + chunk_at(lane % 16, c + lane / 16), a[m]);
    load_b(rows, c, b);
#pragma unroll
    for (int m = 0; m < kMT; ++m)
#pragma unroll
      for (int n = 0; n < kNT; ++n) mma(sum[m][n], a[m], b[n]);
  }
}

template <class Tile, bool kVectors>
__global__ void __launch_bounds__(Tile::kThreads)
    linear_mma_kernel(const __grid_constant__ Product p) {
  constexpr int kBM = Tile::kBM, kBN = Tile::kBN, kStages = Tile::kStages;
  extern __shared__ __align__(16) char smem[];
  const int tile = blockIdx.x / cluster_blocks(), warp = threadIdx.x / kWarp;
  const int t0 = tile % p.n_tiles * kBN, o0 = tile / p.n_tiles * kBM;
  const int64_t g = blockIdx.y;
  const int begin = cluster_rank() * p.runs * p.run, end = min(p.I, begin + p.runs * p.run);
  const int steps = ceil_div(max(end - begin, 0), kStep), run_steps = p.run / kStep;
  const Bf16* w = static_cast<const Bf16*>(p.w) + (g * p.O + o0) * p.I;
  const Bf16* x = p.x + t0 * p.x_row + g * p.x_group;

  int fill = 0, use = 0;  // the stages to fill and to multiply next
  const auto load = [&](int step) {
    if (step < steps) {
      char* to = smem + fill * Tile::kStage;
      const int i = begin + step * kStep;
      load_rows<kVectors, kBM, Tile::kThreads>(to, w, p.I, p.O - o0, i, p.I);
      load_rows<kVectors, kBN, Tile::kThreads>(to + kBM * kLine, x, p.x_row, p.T - t0, i, p.I);
    }
    copy_commit();
    fill = fill + 1 == kStages ? 0 : fill + 1;
  };
  const int o = warp % Tile::kWarpsM * 16 * Tile::kMT, row = warp / Tile::kWarpsM * 8 * Tile::kNT;
  const uint32_t weights = shared_address(smem) + o * kLine;
  const uint32_t rows = shared_address(smem) + (kBM + row) * kLine;

  Sums<Tile::kMT, Tile::kNT> sum;
  RunSums<Tile::kLevels, Tile::kMT, Tile::kNT> runs;
  for (int s = 0; s < kStages - 1; ++s) load(s);
  for (int run = 0, s = 0; run < p.runs; ++run) {
    clear(sum);
    for (const int last = min(steps, (run + 1) * run_steps); s < last; ++s) {
      copy_wait<kStages - 2>();
      __syncthreads();  // everybody's copies are here, and the stage to fill has been read
      load(s + kStages - 1);
      multiply(weights + use * Tile::kStage, rows + use * Tile::kStage, sum);
      use = use + 1 == kStages ? 0 : use + 1;
    }
    runs.add(run, sum);
  }
  copy_wait<0>();
  __syncthreads();
  float* sums = reinterpret_cast<float*>(smem);
  store_sums<kBM, 16>(sum, sums, o, row);
  store_tile<kBM, kBN, Tile::kThreads>(p, sums, g, t0, o0);
}

template <class Tile>
void launch_tile(Product p, int cluster, Stream stream) {
  const Division d = divide<Tile>(p, cluster);
  const Grid grid{
      {d.blocks, static_cast<unsigned>(p.G)}, Tile::kThreads, smem_up_to<Tile::kSmem>(), d.cluster};
  dispatch(in_vectors(p), [&](auto v) { launch(linear_mma_kernel<Tile, v>, grid, stream, p); });
}

// Wide tiles where they are enough for every SM, else narrow ones.
template <class Wide, class Narrow>
void launch_wide_or_narrow(const Product& p, Stream stream) {
  const int enough = processors() + processors() / 4;
  const int cluster = cluster_for<Wide>(p, enough), most = runs_of(p.I, p.O).count;
  if (cluster <= most) return launch_tile<Wide>(p, cluster, stream);
  launch_tile<Narrow>(p, most, stream);
}

}  // namespace

void linear_mma(const Product& p, Stream stream) {
  if (p.T <= 8)
    launch_wide_or_narrow<MmaTile<64, 8, 1, 1, 5>, MmaTile<32, 8, 1, 1, 6>>(p, stream);
  else if (p.T <= 16)
    launch_wide_or_narrow<MmaTile<64, 16, 1, 2, 5>, MmaTile<32, 16, 1, 2, 6>>(p, stream);
  else
    launch_wide_or_narrow<MmaTile<64, 64, 2, 4, 6>, MmaTile<64, 32, 1, 4, 5>>(p, stream);
}

}  // namespace kdtree::cuda
