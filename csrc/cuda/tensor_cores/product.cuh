// What the products on tensor cores share: the order of a sum, and its last part.
//
// The order of a sum is a function of the number of inputs I and of outputs O. The inputs are cut
// into 1, 2, 4 or, for few outputs, 8 runs of equal length, the last ones perhaps shorter or empty; a
// run is one chain of mma in input order, from zero; the runs' float32 sums are added as a binary
// tree, neighbours first. So a block may take one run, two or four, and a cluster of blocks the rest:
// how many each takes depends on the shape and on the rows, and changes no bit.
#pragma once

#include "../mma.cuh"
#include "barrier.cuh"
#include "device.cuh"

namespace kdtree::cuda {

using Bf16 = __nv_bfloat16;

inline constexpr int kMaxRuns = 8;     // blocks of a cluster that every GPU has
inline constexpr int kMostLevels = 2;  // log2 of the runs that a block may take
inline constexpr int kLeastRun = 512;  // inputs: shorter ones are not worth a block
inline constexpr int kRunStep = 128;   // a run is a multiple of every kernel's step
inline constexpr int kFewOutputs = 1024;

// The runs of a product of I inputs and O outputs.
struct Runs {
  int count, length;  // runs; inputs of one
};
inline Runs runs_of(int I, int O) {
  const int most = O <= kFewOutputs ? kMaxRuns : 1 << kMostLevels;
  int count = 1;
  while (count < most && I >= 2 * count * kLeastRun) count *= 2;
  return {count, ceil_div(ceil_div(I, count), kRunStep) * kRunStep};
}

// y[t, g, o] = sum_i x[t, g, i] * w[g, o, i]; scale: of INT4 weights
struct Product {
  const void *w, *scale;
  const Bf16* x;
  void* y;
  int64_t x_row, x_group;
  int T, G, O, I;
  DType y_dtype;
  int run, runs;  // inputs of a run; runs of a block
  int n_tiles;    // blocks of rows
};

// Divides a product into tiles of kBM x kBN and a tile into the blocks of a cluster: a power of two,
// at most the runs and so many that no block takes more than it can.
struct Division {
  int cluster;
  unsigned blocks;  // of a group
};
template <class Tile>
Division divide(Product& p, int cluster) {
  const Runs runs = runs_of(p.I, p.O);
  cluster = max(min(cluster, runs.count), runs.count >> Tile::kLevels);
  p.run = runs.length, p.runs = runs.count / cluster;
  p.n_tiles = ceil_div(p.T, Tile::kBN);
  const int64_t tiles = int64_t{ceil_div(p.O, Tile::kBM)} * p.n_tiles;
  return {cluster, static_cast<unsigned>(tiles * cluster)};
}

// The least cluster that makes so many blocks of a product's tiles.
template <class Tile>
int cluster_for(const Product& p, int64_t blocks) {
  const int64_t tiles = int64_t{ceil_div(p.O, Tile::kBM)} * ceil_div(p.T, Tile::kBN) * p.G;
  int cluster = 1;
  while (cluster < kMaxRuns && tiles * cluster < blocks) cluster *= 2;
  return cluster;
}

// A warp's sums: kMT x kNT tiles of 16 outputs x 8 rows, as mma has them.
template <int kMT, int kNT>
using Sums = float[kMT][kNT][4];

// Adds the sums of a block's runs as a binary tree. kLevels: log2 of the most runs
template <int kLevels, int kMT, int kNT>
struct RunSums {
  Sums<kMT, kNT> waiting[kLevels];  // for the sums of their neighbours

  // sum: of run `run`; after the last one, of all.
  __device__ void add(int run, Sums<kMT, kNT>& sum) {
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const bool second = run >> level & 1;
#pragma unroll
      for (int m = 0; m < kMT; ++m)
#pragma unroll
        for (int n = 0; n < kNT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& other = waiting[level][m][n][i];
            if (second)
              sum[m][n][i] = other + sum[m][n][i];
            else
              other = sum[m][n][i];
          }
      if (!second) return;
    }
  }
};

template <int kMT, int kNT>
__device__ inline void clear(Sums<kMT, kNT>& sum) {
#pragma unroll
  for (int m = 0; m < kMT; ++m)
#pragma unroll
    for (int n = 0; n < kNT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m][n][i] = 0;
}

// A row of a block's sums in shared memory, floats: no two rows of a fragment in one bank.
template <int kBM>
inline constexpr int kPitch = kBM + 4;
template <int kBM, int kBN>
inline constexpr int kSumsBytes = kBN * kPitch<kBM> * int{sizeof(float)};

// A warp's sums to shared memory [kBN][kPitch], or added to those there. o, row: its first; kStride: of
// its tiles' outputs
template <int kBM, int kStride, bool kAdd = false, int kMT, int kNT>
__device__ inline void store_sums(const Sums<kMT, kNT>& sum, float* to, int o, int row) {
  const int lane = threadIdx.x % kWarp;
  to += (row + lane % 4 * 2) * kPitch<kBM> + o + lane / 4;
#pragma unroll
  for (int m = 0; m < kMT; ++m)
#pragma unroll
    for (int n = 0; n < kNT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& at = to[(8 * n + i % 2) * kPitch<kBM> + m * kStride + i / 2 * 8];
        at = kAdd ? at + sum[m][n][i] : sum[m][n][i];
      }
}

// v[0] = v[0] + .. + v[count - 1] as a binary tree, for four outputs at once.
__device__ inline void add_tree(float (&v)[kMaxRuns][4], int count) {
#pragma unroll
  for (int step = 1; step < kMaxRuns; step *= 2)
#pragma unroll
    for (int b = 0; b < kMaxRuns; b += 2 * step)
      if (b + step < count)
#pragma unroll
        for (int e = 0; e < 4; ++e) v[b][e] = v[b][e] + v[b + step][e];
}

// Adds the sums of a cluster's blocks and stores them as outputs, by kThreads threads of each, the
// elements shared among the blocks. t0, o0: the tile's first row and output; read(): called by each warp
// once it has read all
template <int kBM, int kBN, int kThreads, class Read>
__device__ inline void add_sums(const Product& p, const float* sums, int64_t g, int t0, int o0,
                                Read read) {
  constexpr int kQuads = kBM / 4;
  const int blocks = cluster_blocks(), rows = min(kBN, p.T - t0), lane = threadIdx.x % kWarp;
  bool more = true;
#pragma unroll 1
  for (int i = cluster_rank() * kThreads + threadIdx.x; more; i += blocks * kThreads) {
    const int row = i / kQuads, o = i % kQuads * 4, left = p.O - o0 - o;
    float v[kMaxRuns][4];
#pragma unroll
    for (int b = 0; b < kMaxRuns; ++b)
      if (b < blocks && i < rows * kQuads)
        load_cluster(sums + row * kPitch<kBM> + o, b, v[b]);
    more = i - lane + blocks * kThreads < rows * kQuads;
    if (!more) read();
    if (i >= rows * kQuads) continue;
    add_tree(v, blocks);
    const int64_t at = ((t0 + row) * int64_t{p.G} + g) * p.O + o0 + o;
    const auto put = [&](auto* y) {
      p.O % 4 == 0 && left >= 4 ? store<true>(y + at, left, v[0])
                                : store<false>(y + at, left, v[0]);
    };
    p.y_dtype == DType::f32 ? put(static_cast<float*>(p.y)) : put(static_cast<Bf16*>(p.y));
  }
}

// Likewise, by all threads, once all have left their sums.
template <int kBM, int kBN, int kThreads>
__device__ inline void store_tile(const Product& p, const float* sums, int64_t g, int t0, int o0) {
  cluster_sync();
  add_sums<kBM, kBN, kThreads>(p, sums, g, t0, o0, [] {});
  cluster_arrive();
  cluster_wait();  // nobody leaves while its sums are being read
}

}  // namespace kdtree::cuda
