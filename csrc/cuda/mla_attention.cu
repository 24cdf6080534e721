// Verify attention over the latent cache, any shape: float32 products, no tensor cores, but for
// is_latent's. FP8 latents are widened to float32 on their way to shared memory.
//
//   out[b, n, h] = softmax_j(scale * q[b, n, h] . cache[j]) . cache[j][:C], see MlaAttentionParams
//
// A row at position p has ceil(max(p - 15, 0) / kSplit) splits and one part more, the tail: its
// last kTail positions. The partial kernel leaves each part's largest score, sum of weights and
// weighted latents in the workspace; the merge kernel adds them in order. Which block computes a
// part, and what slot holds a key, changes no sum.
//
// Grid    partial: x = (sequence, node, kHeadBlock heads), y = parts, each block walking every
//         gridDim.y-th; merge: x = row, y = kThreads latent features. The grid depends on shapes
//         alone: blocks beyond a row's context end at once. Rows that overflow the workspace take
//         further launches.
// Tiling  a tile is kTile keys, in shared memory once for the scores and for the sums of latents:
//
//           scores: warp w owns keys 4w .. 4w + 3 x 8 heads, its lanes over the features
//           softmax: 16 threads a head, one a key
//           values: thread i owns the features i, i + kThreads, ... of the 8 heads' sums
//
// Smem    stages * kTile * (C + R) elements and 8 * (2C + R) floats: 73 KB at 512 + 64 in bf16, and
//         in FP8, which has one stage.
// Floor   S * (C + R) elements of HBM a sequence and 2 * S * (2C + R) flops a row: at S = 8192,
//         512 + 64 in bf16 9.4 MB, 2 us at 4.8 TB/s (H200), in FP8 5.4 MB; and 0.27 us a row at
//         67 TFLOP/s, which binds from 8 rows on.
// Needs   C + R <= 768 (ops_attention.cpp); 16-byte latents are copied asynchronously, others not.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "mla_attention.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kTile = 16;  // keys: the tail is one tile, and no tile crosses a page or a split
constexpr int kThreads = kTile * kHeadBlock;
constexpr int kWarps = kThreads / kWarp;
constexpr int kWarpKeys = kTile / kWarps;
constexpr int kMaxSmem = 100000;        // bytes: what every GPU grants, less the static arrays
constexpr int kMaxBlocks = 8192;        // some waves of any GPU; more would only end at once
constexpr int kMaxGridY = 65535;        // of any GPU
constexpr float kLog2E = 1.442695041f;  // scores are in units of log2 e, so that exp is exp2
static_assert(kTile >= kTail && kPage % kTile == 0 && kSplit % kTile == 0);
static_assert(kWarpKeys * kHeadBlock == kWarp, "a warp's scores end one in each lane");

// Shared memory of the partial kernel.
template <class Element>
struct Smem {
  Element* tiles;               // [stages, kTile, Z]
  float (*weight)[kHeadBlock];  // [kTile, kHeadBlock], on 16 bytes
  float* keep;                  // [kHeadBlock]: what becomes of the sums so far
  float (*score)[kTile];        // [kHeadBlock, kTile]
  float* q;                     // [kHeadBlock, Z]
  float* acc;                   // [kHeadBlock, C]

  static int64_t bytes(int stages, int Z, int C) {
    const int64_t floats = 2 * kTile * kHeadBlock + kHeadBlock + int64_t{kHeadBlock} * (Z + C);
    return int64_t{stages} * kTile * Z * int64_t{sizeof(Element)} + floats * int64_t{sizeof(float)};
  }
  __device__ Smem(unsigned char* base, int stages, int Z) {
    tiles = reinterpret_cast<Element*>(base);
    auto* floats = reinterpret_cast<float*>(tiles + stages * kTile * Z);
    weight = reinterpret_cast<float (*)[kHeadBlock]>(floats);
    score = reinterpret_cast<float (*)[kTile]>(floats + kTile * kHeadBlock);
    keep = floats + 2 * kTile * kHeadBlock;
    q = keep + kHeadBlock;
    acc = q + kHeadBlock * Z;
  }
};

// Starts copying the latents of positions begin .. begin + count - 1, a warp a latent; from FP8 they
// are there at once.
template <bool kFp8, class Element>
__device__ void load_tile(const AttentionLaunch& a, const RowBlock& rows, int begin, int count,
                          Element* tile) {
  const MlaAttentionParams& p = a.p;
  const int Z = p.C + p.R, lane = threadIdx.x % kWarp;
  const int32_t* table = p.block_table + int64_t{rows.b} * p.max_pages;
  for (int k = threadIdx.x / kWarp; k < count; k += kWarps) {
    const int slot = rows.slot(begin + k);
    const int64_t token = int64_t{table[slot / kPage]} * kPage + slot % kPage;
    Element* to = tile + k * Z;
    if constexpr (kFp8) {
      const auto* row = static_cast<const uint8_t*>(p.cache) + token * p.fp8_bytes;
      widen_fp8(row, p.C, p.R, to);
      continue;
    }
    const auto* from = static_cast<const Element*>(p.cache) + token * Z;
    if (a.aligned) {
      constexpr int kVec = Vec<Element>::kSize;
      for (int i = lane * kVec; i < Z; i += kWarp * kVec)
        __pipeline_memcpy_async(to + i, from + i, sizeof(Vec<Element>));
    } else {
      for (int i = lane; i < Z; i += kWarp) to[i] = from[i];
    }
  }
  __pipeline_commit();
}

// score[h, k] = q[h] . tile[k], for this warp's keys. Lane l holds the features l, l + 32, ...
template <class Element>
__device__ void score_tile(const Smem<Element>& s, const Element* tile, int Z) {
  const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * kWarpKeys;
  float sum[kWarp] = {};
  for (int i = lane; i < Z; i += kWarp) {
    float key[kWarpKeys];
#pragma unroll
    for (int k = 0; k < kWarpKeys; ++k) key[k] = float(tile[(first + k) * Z + i]);
#pragma unroll
    for (int h = 0; h < kHeadBlock; ++h) {
      const float q = s.q[h * Z + i];
#pragma unroll
      for (int k = 0; k < kWarpKeys; ++k)
        sum[k * kHeadBlock + h] = fmaf(q, key[k], sum[k * kHeadBlock + h]);
    }
  }
  warp_sums(sum);
  s.score[lane % kHeadBlock][first + lane / kHeadBlock] = sum[0];
}

// One tile of the online softmax: thread (h, k) = (i / kTile, i % kTile). Keys from count on weigh
// exactly zero. top and sum are the head's, the same in its kTile threads.
template <class Element>
__device__ void weigh_tile(const Smem<Element>& s, int count, float scale, float& top, float& sum) {
  const int h = threadIdx.x / kTile, k = threadIdx.x % kTile;
  const float score = k < count ? s.score[h][k] * scale : -INFINITY;
  float largest = score;
  for (int d = kTile / 2; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  largest = fmaxf(largest, top);
  const float keep = exp2f(top - largest);
  const float weight = k < count ? exp2f(score - largest) : 0.f;
  float added = weight;
  for (int d = kTile / 2; d > 0; d /= 2) added += __shfl_xor_sync(~0u, added, d);
  top = largest;
  sum = fmaf(sum, keep, added);
  s.weight[k][h] = weight;
  if (k == 0) s.keep[h] = keep;
}

// acc[h] = acc[h] * keep[h] + sum over the keys in order of weight[k, h] * tile[k, :C]
template <class Element>
__device__ void add_tile(const Smem<Element>& s, const Element* tile, int count, int Z, int C) {
  for (int c = threadIdx.x; c < C; c += kThreads) {
    float sum[kHeadBlock];
#pragma unroll
    for (int h = 0; h < kHeadBlock; ++h) sum[h] = s.acc[h * C + c] * s.keep[h];
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
      const float value = float(tile[k * Z + c]);
      const auto* weight = reinterpret_cast<const Vec<float>*>(s.weight[k]);
#pragma unroll
      for (int v = 0; v < kHeadBlock / Vec<float>::kSize; ++v) {
        const Vec<float> four = weight[v];
#pragma unroll
        for (int i = 0; i < Vec<float>::kSize; ++i) {
          float& total = sum[v * Vec<float>::kSize + i];
          total = fmaf(four.v[i], value, total);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadBlock; ++h) s.acc[h * C + c] = sum[h];
  }
}

// Kept: of a latent in shared memory, float where the cache is FP8
template <class Element, class Kept, bool kFp8>
__global__ void __launch_bounds__(kThreads)
    partial_kernel(const __grid_constant__ AttentionLaunch a) {
  const MlaAttentionParams& p = a.p;
  const RowBlock rows(p, a.first + blockIdx.x);
  if (rows.position < 0) return;
  const int Z = p.C + p.R, heads = min(kHeadBlock, p.H - rows.head);
  const int body = rows.body(), splits = rows.splits();
  extern __shared__ __align__(16) unsigned char smem[];
  const Smem<Kept> s(smem, a.stages, Z);

  const auto* q = static_cast<const Element*>(p.q) + rows.row(p) * Z;
  for (int i = threadIdx.x; i < kHeadBlock * Z; i += kThreads)
    s.q[i] = i < heads * Z ? float(q[i]) : 0.f;

  for (int part = blockIdx.y; part <= splits; part += gridDim.y) {
    const int begin = part < splits ? part * kSplit : body;
    const int end = part < splits ? min(begin + kSplit, body) : rows.position + 1;
    for (int c = threadIdx.x; c < p.C; c += kThreads)  // the sums of this thread alone
      for (int h = 0; h < kHeadBlock; ++h) s.acc[h * p.C + c] = 0;
    float top = -INFINITY, sum = 0;
    int stage = 0;
    load_tile<kFp8>(a, rows, begin, min(kTile, end - begin), s.tiles);
    for (int at = begin; at < end; at += kTile) {
      const int next = at + kTile, count = min(kTile, end - at);
      const Kept* tile = s.tiles + stage * kTile * Z;
      if (a.stages > 1) stage ^= 1;
      const bool ahead = a.stages > 1 && next < end;
      if (ahead) load_tile<kFp8>(a, rows, next, min(kTile, end - next), s.tiles + stage * kTile * Z);
      __pipeline_wait_prior(ahead ? 1 : 0);
      __syncthreads();  // every thread's copies of this tile, and q, are there
      score_tile(s, tile, Z);
      __syncthreads();  // all scores are there
      weigh_tile(s, count, p.scale * kLog2E, top, sum);
      __syncthreads();  // all weights are there
      add_tile(s, tile, count, Z, p.C);
      __syncthreads();  // the tile, scores and weights are used up
      if (!ahead && next < end) load_tile<kFp8>(a, rows, next, min(kTile, end - next), s.tiles);
    }

    auto* block =
        static_cast<float*>(p.workspace) + int64_t{blockIdx.x} * kHeadBlock * a.parts * (p.C + 2);
    const auto out = [&](int h) { return block + (int64_t{h} * a.parts + part) * (p.C + 2); };
    for (int h = 0; h < heads; ++h)
      for (int c = threadIdx.x; c < p.C; c += kThreads) out(h)[c] = s.acc[h * p.C + c];
    const int h = threadIdx.x / kTile;
    if (threadIdx.x % kTile == 0 && h < heads) {
      out(h)[p.C] = top;
      out(h)[p.C + 1] = sum;
    }
  }
}

// out = sum over the parts in order of 2^(top - largest top) * acc, over the same of the sums.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ AttentionLaunch a) {
  const MlaAttentionParams& p = a.p;
  const RowBlock rows(p, a.first + blockIdx.x / kHeadBlock);
  const int h = blockIdx.x % kHeadBlock, c = blockIdx.y * kThreads + threadIdx.x;
  if (rows.head + h >= p.H) return;
  auto* out = static_cast<Element*>(p.out) + (rows.row(p) + h) * p.C;
  if (rows.position < 0) {
    if (c < p.C) out[c] = Element(0.f);
    return;
  }
  const int parts = rows.splits() + 1, size = p.C + 2;
  const float* part = static_cast<const float*>(p.workspace) + int64_t{blockIdx.x} * a.parts * size;
  const float* value = part + min(c, p.C - 1);

  __shared__ float largest[kWarps], factor[kThreads], weight[kThreads];
  float top = -INFINITY;
  for (int i = threadIdx.x; i < parts; i += kThreads)
    top = fmaxf(top, part[int64_t{i} * size + p.C]);
  for (int d = kWarp / 2; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (threadIdx.x % kWarp == 0) largest[threadIdx.x / kWarp] = top;
  __syncthreads();  // the warps' largest are there
  for (float x : largest) top = fmaxf(top, x);

  float sum = 0, acc = 0;
  for (int first = 0; first < parts; first += kThreads) {
    const int count = min(kThreads, parts - first), i = threadIdx.x;
    __syncthreads();  // the factors of the run before are used up
    if (i < count) {
      factor[i] = exp2f(part[int64_t{first + i} * size + p.C] - top);
      weight[i] = part[int64_t{first + i} * size + p.C + 1];
    }
    __syncthreads();  // the factors of this run are there
#pragma unroll 8
    for (int k = 0; k < count; ++k) {
      sum = fmaf(factor[k], weight[k], sum);
      acc = fmaf(factor[k], value[int64_t{first + k} * size], acc);
    }
  }
  if (c < p.C) out[c] = Element(acc / sum);
}

template <class Element, bool kFp8>
void run(const MlaAttentionParams& p, Stream stream) {
  using Kept = std::conditional_t<kFp8, float, Element>;
  const int Z = p.C + p.R;
  AttentionLaunch a{.p = p};
  a.parts = static_cast<int>((int64_t{p.max_pages} * kPage + kSplit - 1) / kSplit) + 1;
  a.stages = Smem<Kept>::bytes(2, Z, p.C) <= kMaxSmem ? 2 : 1;
  a.aligned = Z % Vec<Element>::kSize == 0 && reinterpret_cast<uintptr_t>(p.cache) % 16 == 0;
  const DynamicSmem smem = smem_up_to<kMaxSmem>(Smem<Kept>::bytes(a.stages, Z, p.C));
  const int64_t block_bytes = int64_t{kHeadBlock} * a.parts * (p.C + 2) * int64_t{sizeof(float)};
  const int64_t at_once = p.workspace_bytes / block_bytes;
  const int64_t blocks = int64_t{p.B} * p.N * ceil_div(p.H, kHeadBlock);
  for (a.first = 0; a.first < blocks; a.first += at_once) {
    const int x = static_cast<int>(std::min(at_once, blocks - a.first));
    const int y = std::clamp(kMaxBlocks / x, 1, std::min(a.parts, kMaxGridY));
    launch(partial_kernel<Element, Kept, kFp8>, {dim3(x, y), kThreads, smem}, stream, a);
    launch(merge_kernel<Element>, {dim3(x * kHeadBlock, ceil_div(p.C, kThreads)), kThreads}, stream,
           a);
  }
}

}  // namespace

void mla_attention(const MlaAttentionParams& p, Stream stream) {
  if (is_latent(p)) return (p.fp8_bytes ? latent_fp8_attention : latent_attention)(p, stream);
  dispatch(p.dtype, [&](auto element) {
    dispatch(p.fp8_bytes != 0, [&](auto fp8) { run<decltype(element), fp8()>(p, stream); });
  });
}

}  // namespace kdtree::cuda
