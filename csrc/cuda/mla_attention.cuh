// What the two kernels of mla_attention share: their launch, and the rows a block has.
#pragma once

#include "fp8.cuh"
#include "mla.cuh"

namespace kdtree::cuda {

// Latents of 512 + 64 features in bf16, on tensor cores: tensor_cores/latent_mma.cu.
inline bool is_latent(const MlaAttentionParams& p) {
  return p.C == kLatent && p.R == kRope && p.dtype == DType::bf16;
}
void latent_attention(const MlaAttentionParams& p, Stream stream);
bool latent_reads_fp8(const MlaAttentionParams& p);  // without a pass that widens all rows first
void latent_fp8_attention(const MlaAttentionParams& p, Stream stream);

struct AttentionLaunch {
  MlaAttentionParams p;
  int64_t first;  // row block of blockIdx.x = 0
  int parts;      // of a row in the workspace
  int stages;     // tiles in shared memory
  bool aligned;   // latents are 16-byte rows at 16-byte addresses
};

// kHeadBlock rows: heads of one node.
struct RowBlock {
  int b, n, head;
  int context, position;  // position < 0: padding
  uint64_t ancestors;
  bool chain;

  __device__ RowBlock(const MlaAttentionParams& p, int64_t i) {
    const int head_blocks = ceil_div(p.H, kHeadBlock);
    head = static_cast<int>(i % head_blocks) * kHeadBlock;
    const int64_t node = i / head_blocks;
    b = static_cast<int>(node / p.N);
    n = static_cast<int>(node % p.N);
    context = p.context[b];
    chain = p.ancestors == nullptr;
    ancestors = chain ? 0 : static_cast<uint64_t>(p.ancestors[node]);
    const int ahead = chain ? n + 1 : __popcll(ancestors);
    position = ahead > 0 ? context + ahead - 1 : -1;
  }
  __device__ int body() const { return max(position - kTail + 1, 0); }  // keys before the tail
  __device__ int splits() const { return ceil_div(body(), kSplit); }
  __device__ int64_t row(const MlaAttentionParams& p) const {
    return (int64_t{b} * p.N + n) * p.H + head;
  }
  // The token slot that holds a position: the row's own ancestor's from the context on.
  __device__ int slot(int at) const {
    if (chain || at < context) return at;
    uint64_t word = ancestors;
    for (int i = at - context; i > 0; --i) word &= word - 1;
    return context + __ffsll(static_cast<long long>(word)) - 1;
  }
};

// A row of FP8 latents in float32, by a warp.
__device__ inline void widen_fp8(const uint8_t* row, int C, int R, float* to) {
  const int lane = threadIdx.x % kWarp;
  const float scale = *scale_of(row, C);
  for (int c = 4 * lane; c < C; c += 4 * kWarp) {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(row + c);
    const float2 low = from_e4m3(codes & 0xffff), high = from_e4m3(codes >> 16);
    to[c] = low.x * scale, to[c + 1] = low.y * scale;
    to[c + 2] = high.x * scale, to[c + 3] = high.y * scale;
  }
  for (int i = lane; i < R; i += kWarp) to[C + i] = float(rope_of(row, C)[i]);
}

}  // namespace kdtree::cuda
