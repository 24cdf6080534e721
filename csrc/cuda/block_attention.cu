// Attention of a block of draft slots, any shape: float32 products, no tensor cores.
// The block's queries and keys are normed and rotated as they are read.
//
//   out[b, i, h] = softmax_j(scale * q[b, i, h] . key[j]) . value[j], see BlockAttentionParams
//
// A sequence's keys, the cached ones in order of position and then the block's, are split into
// at most kBlockParts runs of whole tiles. The partial kernel leaves each run's largest score, sum
// of weights and weighted values in the workspace; the merge kernel adds them in order. The runs
// follow from the number of keys alone.
//
// Grid    partial: x = (sequence, key head, kRows queries), y = runs; merge: x = query. The grid
//         depends on shapes alone: blocks beyond a sequence's keys end at once. Sequences that
//         overflow the workspace take further launches.
// Tiling  a tile is kBlockTile keys and values, in shared memory for kRows queries:
//
//           scores: kLanes threads a query, each takes every kLanes-th key
//           values: thread t owns the features t, t + kThreads, ... of the kRows sums
//
// Smem    (kRows + 2 * kBlockTile) * (width + 1) floats and 2 KB: 43 KB at width 128.
// Floor   2 * length * G * width elements of HBM a sequence, once for every kRows queries of
//         a key head (further times from L2): at length 4096, 8 heads of 128 in bf16 16.8 MB, 3.5 us
//         at 4.8 TB/s (H200).
// Needs   width <= kMaxHead (ops_draft.cpp).
#include <algorithm>

#include "block.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 16;                   // queries that share a tile
constexpr int kLanes = kThreads / kRows;    // threads that score a query
constexpr int kKeys = kBlockTile / kLanes;  // keys that such a thread scores
constexpr int kFeatures = 2;                // features that a thread owns: 256 / kThreads
constexpr int kWarps = kThreads / kWarp;
constexpr float kLog2E = 1.442695041f;  // scores are in units of log2 e, so that exp is exp2

struct BlockLaunch {
  BlockAttentionParams p;
  int first;       // sequence of blockIdx.x = 0
  int row_blocks;  // kRows queries each, of a key head
  int parts;       // runs of a query in the workspace
};

// The keys of a sequence: cached ones, then the block's.
struct Keys {
  int length, first, count;  // cached positions, the first that is seen, keys in all

  __device__ Keys(const BlockAttentionParams& p, int b) {
    length = max(p.length[b], 0);
    if (!p.window) length = min(length, p.S);
    first = p.window ? max(length - p.window + 1, 0) : 0;
    count = length - first + p.N;
  }
  __device__ int run() const {  // keys of a run
    return ceil_div(ceil_div(count, kBlockTile), kBlockParts) * kBlockTile;
  }
  // The slot of key j of the block; a cached one's is negative.
  __device__ int slot_of(int j) const { return first + j - length; }
  __device__ bool visible(const BlockAttentionParams& p, int slot, int j) const {
    const int other = slot_of(j);
    return (!p.window || abs(slot - other) < p.window) && (!p.causal || other <= slot);
  }
};

struct Smem {
  float (*weight)[kRows];  // [kBlockTile, kRows], on 16 bytes
  float* keep;             // [kRows]: what becomes of the sums so far
  float *q, *k, *v;        // [kRows, stride], [kBlockTile, stride] twice
  int stride;              // odd where the width is even, so that rows start in other banks

  static constexpr int bytes(int width) {
    const int floats = kBlockTile * kRows + kRows + (kRows + 2 * kBlockTile) * (width + 1);
    return floats * static_cast<int>(sizeof(float));
  }
  __device__ Smem(float* base, int width) : stride(width + 1) {
    weight = reinterpret_cast<float (*)[kRows]>(base);
    keep = base + kBlockTile * kRows;
    q = keep + kRows;
    k = q + kRows * stride;
    v = k + kBlockTile * stride;
  }
};

// The queries of a block: row r is slot (first + r) / group, query head head * group + (first + r)
// % group of key head `head`.
struct Queries {
  int b, head, group, first, count;

  __device__ Queries(const BlockLaunch& a, int block) {
    group = a.p.H / a.p.G;
    first = block % a.row_blocks * kRows;
    head = block / a.row_blocks % a.p.G;
    b = a.first + block / a.row_blocks / a.p.G;
    count = min(kRows, a.p.N * group - first);
  }
  __device__ int slot(int r) const { return (first + r) / group; }
  __device__ int query_head(int r) const { return head * group + (first + r) % group; }
  __device__ int64_t row(const BlockAttentionParams& p, int r) const {
    return (int64_t{b} * p.N + slot(r)) * p.H + query_head(r);
  }
};

// A head of a slot, as projected.
template <class Element>
__device__ const Element* projected(const BlockAttentionParams& p, int b, int slot, int head) {
  const int64_t row = (int64_t{b} * p.N + slot) * (p.H + 2 * p.G) + head;
  return static_cast<const Element*>(p.qkv) + row * p.width;
}

// Writes such a head of a query or key, normed and rotated; a warp calls it.
template <class Element>
__device__ void turn_head(const BlockAttentionParams& p, int b, int slot, int head, float* y) {
  const auto* norm = static_cast<const Element*>(head < p.H ? p.q_norm : p.k_norm);
  const int64_t position =
      int64_t{max(p.length[b], 0)} + slot;  // of a length beyond the cache, too
  turn(projected<Element>(p, b, slot, head), norm, p.rope, p.positions, position, p.width, p.eps,
       [&](int c, float value) { y[c] = value; });
}

// Reads keys and values begin .. begin + count - 1, a warp a row.
template <class Element>
__device__ void load_tile(const BlockAttentionParams& p, const Keys& keys, const Queries& queries,
                          int begin, int count, const Smem& s) {
  const int lane = threadIdx.x % kWarp, b = queries.b, head = queries.head;
  for (int j = threadIdx.x / kWarp; j < count; j += kWarps) {
    const int slot = keys.slot_of(begin + j);
    const int64_t row = int64_t{b} * p.S + (keys.first + begin + j) % p.S;
    const auto* k = static_cast<const Element*>(p.cache) + (2 * row * p.G + head) * p.width;
    const auto* v = k + int64_t{p.G} * p.width;
    if (slot >= 0) {
      turn_head<Element>(p, b, slot, p.H + head, s.k + j * s.stride);
      v = projected<Element>(p, b, slot, p.H + p.G + head);
    }
    for (int c = lane; c < p.width; c += kWarp) {
      if (slot < 0) s.k[j * s.stride + c] = float(k[c]);
      s.v[j * s.stride + c] = float(v[c]);
    }
  }
}

// One tile of the online softmax: thread (r, l) = (i / kLanes, i % kLanes) takes the keys l, l +
// kLanes, ... of query r. Keys that it does not see weigh exactly zero. top and sum are the query's,
// the same in its kLanes threads.
__device__ void weigh_tile(const BlockAttentionParams& p, const Keys& keys, int slot, int begin,
                           int count, const Smem& s, float& top, float& sum) {
  const int r = threadIdx.x / kLanes, l = threadIdx.x % kLanes;
  float score[kKeys] = {};
  for (int i = 0; i < p.width; ++i) {
    const float q = s.q[r * s.stride + i];
#pragma unroll
    for (int m = 0; m < kKeys; ++m)
      score[m] = fmaf(q, s.k[(l + m * kLanes) * s.stride + i], score[m]);
  }
  bool seen[kKeys];
  float largest = top;
#pragma unroll
  for (int m = 0; m < kKeys; ++m) {
    const int j = l + m * kLanes;
    seen[m] = j < count && keys.visible(p, slot, begin + j);
    score[m] *= p.scale * kLog2E;
    if (seen[m]) largest = fmaxf(largest, score[m]);
  }
  for (int d = kLanes / 2; d > 0; d /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  float added = 0;
#pragma unroll
  for (int m = 0; m < kKeys; ++m) {
    const float weight = seen[m] ? exp2f(score[m] - largest) : 0.f;
    s.weight[l + m * kLanes][r] = weight;
    added += weight;
  }
  for (int d = kLanes / 2; d > 0; d /= 2) added += __shfl_xor_sync(~0u, added, d);
  const float keep = largest == -INFINITY ? 1.f : exp2f(top - largest);
  top = largest;
  sum = fmaf(sum, keep, added);
  if (l == 0) s.keep[r] = keep;
}

// acc[r] = acc[r] * keep[r] + sum over the keys in order of weight[j, r] * value[j, c]
__device__ void add_values(const Smem& s, int c, int count, float (&acc)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) acc[r] *= s.keep[r];
  for (int j = 0; j < count; ++j) {
    const float value = s.v[j * s.stride + c];
    const auto* weight = reinterpret_cast<const Vec<float>*>(s.weight[j]);
#pragma unroll
    for (int v = 0; v < kRows / Vec<float>::kSize; ++v) {
      const Vec<float> four = weight[v];
#pragma unroll
      for (int i = 0; i < Vec<float>::kSize; ++i) {
        float& total = acc[v * Vec<float>::kSize + i];
        total = fmaf(four.v[i], value, total);
      }
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) partial_kernel(const __grid_constant__ BlockLaunch a) {
  begin_early();
  const BlockAttentionParams& p = a.p;
  const Queries queries(a, static_cast<int>(blockIdx.x));
  const Keys keys(p, queries.b);
  const int64_t start = int64_t{blockIdx.y} * keys.run();
  if (start >= keys.count) return;
  const int begin = static_cast<int>(start), end = min(begin + keys.run(), keys.count);
  extern __shared__ __align__(16) float smem[];
  const Smem s(smem, p.width);

  for (int r = threadIdx.x / kWarp; r < kRows; r += kWarps) {
    float* q = s.q + r * s.stride;
    if (r < queries.count)
      turn_head<Element>(p, queries.b, queries.slot(r), queries.query_head(r), q);
    else
      for (int c = threadIdx.x % kWarp; c < p.width; c += kWarp) q[c] = 0;
  }

  const int slot = queries.slot(threadIdx.x / kLanes);
  float top = -INFINITY, sum = 0, acc[kFeatures][kRows] = {};
  for (int at = begin; at < end; at += kBlockTile) {
    const int count = min(kBlockTile, end - at);
    load_tile<Element>(p, keys, queries, at, count, s);
    __syncthreads();  // q and this tile are there
    weigh_tile(p, keys, slot, at, count, s, top, sum);
    __syncthreads();  // all weights are there
#pragma unroll
    for (int f = 0; f < kFeatures; ++f)
      if (const int c = threadIdx.x + f * kThreads; c < p.width) add_values(s, c, count, acc[f]);
    __syncthreads();  // tile and weights are used up
  }

  const int64_t sequence = int64_t{a.first} * p.N * p.H;  // rows before the launch's
  const auto out = [&](int r) {
    return static_cast<float*>(p.workspace) +
           ((queries.row(p, r) - sequence) * a.parts + blockIdx.y) * (p.width + 2);
  };
#pragma unroll
  for (int f = 0; f < kFeatures; ++f)
    if (const int c = threadIdx.x + f * kThreads; c < p.width)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (r < queries.count) out(r)[c] = acc[f][r];
  const int r = threadIdx.x / kLanes;
  if (threadIdx.x % kLanes == 0 && r < queries.count) {
    out(r)[p.width] = top;
    out(r)[p.width + 1] = sum;
  }
}

// out = sum over the runs in order of 2^(top - largest top) * acc, over the same of the sums.
template <class Element>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ BlockLaunch a) {
  begin_early();
  const BlockAttentionParams& p = a.p;
  const int64_t row = int64_t{a.first} * p.N * p.H + blockIdx.x;
  const Keys keys(p, static_cast<int>(row / p.H / p.N));
  const int parts = ceil_div(keys.count, keys.run()), size = p.width + 2;
  const float* part = static_cast<const float*>(p.workspace) + int64_t{blockIdx.x} * a.parts * size;
  float top = -INFINITY;
  for (int i = 0; i < parts; ++i) top = fmaxf(top, part[i * size + p.width]);
  auto* out = static_cast<Element*>(p.out) + row * p.width;
  for (int c = threadIdx.x; c < p.width; c += kThreads) {
    float sum = 0, acc = 0;
    for (int i = 0; i < parts; ++i) {
      const float factor = exp2f(part[i * size + p.width] - top);
      sum = fmaf(factor, part[i * size + p.width + 1], sum);
      acc = fmaf(factor, part[i * size + c], acc);
    }
    out[c] = Element(acc / sum);
  }
}

template <class Element>
void run(const BlockAttentionParams& p, Stream stream) {
  BlockLaunch a{.p = p};
  a.row_blocks = ceil_div(p.N * (p.H / p.G), kRows);
  a.parts = std::min(kBlockParts, ceil_div(p.S + p.N, kBlockTile));
  const int64_t bytes =
      int64_t{p.N} * p.H * a.parts * (p.width + 2) * static_cast<int64_t>(sizeof(float));
  const int at_once = static_cast<int>(p.workspace_bytes / bytes);
  for (a.first = 0; a.first < p.B; a.first += at_once) {
    const int count = std::min(at_once, p.B - a.first);
    const dim3 blocks(count * p.G * a.row_blocks, a.parts), rows(count * p.N * p.H);
    const DynamicSmem smem = smem_up_to<Smem::bytes(kMaxHead)>(Smem::bytes(p.width));
    const Grid parts{.blocks = blocks, .threads = kThreads, .smem = smem, .early = true};
    launch(partial_kernel<Element>, parts, stream, a);
    launch(merge_kernel<Element>, {.blocks = rows, .threads = kThreads, .early = true}, stream, a);
  }
}

}  // namespace

void block_attention(const BlockAttentionParams& p, Stream stream) {
  dispatch(p.dtype, [&](auto element) { run<decltype(element)>(p, stream); });
}

}  // namespace kdtree::cuda
