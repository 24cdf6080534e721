// mla_attention over FP8 latents of 512 + 64 features beside bfloat16 activations: the rows that a
// call can see are widened to bfloat16, then attended to by tensor cores as any others: latent.cuh.
// Where latent_reads_fp8 says so they are widened there, tile by tile, and nothing here is launched.
//
//   widened[b, i] = (bf16(code * scale) | rope part) of token slot i of sequence b
//
// Grid    x = runs of kRun token slots, each block walking every gridDim.x-th; y = sequence. It depends
//         on shapes alone; the slots behind a sequence's last node are left as they are.
// Tiling  a warp takes kRun / kWarps slots at once: a lane has 16 codes, 8 lanes the rope part.
// Floor   656 bytes read and 1152 written a slot: at S = 32768 59 MB, 13 us at 4.4 TB/s (H200) and less
//         where the second-level cache takes what is written. All layers share the widened rows' place.
// Needs   a cache on 16 bytes, which ops_attention.cpp asks of FP8.
#include <algorithm>

#include "../mla_attention.cuh"
#include "device.cuh"

namespace kdtree::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kRun = 16, kThreads = 128, kWarps = kThreads / kWarp, kOwn = kRun / kWarps;
constexpr int kWidth = kLatent + kRope;
constexpr int kCodes = kLatent / kWarp;      // of a lane
constexpr int kRopeLanes = kRope * 2 / 16;   // of 16 bytes each
constexpr int kBlocksEach = 8;               // blocks of a processor
static_assert(kCodes == 16 && kPage % kRun == 0);

struct WidenLaunch {
  MlaAttentionParams p;
  Bf16* rows;      // [B * max_pages, kPage, kWidth]
  int32_t* table;  // [B, max_pages]: of the widened rows
};

// How many slots of a sequence hold what a node sees; padding sees nothing.
__device__ inline int seen_slots(const MlaAttentionParams& p, int b) {
  if (!p.ancestors) return p.context[b] + p.N;
  const auto* word = reinterpret_cast<const uint64_t*>(p.ancestors) + int64_t{b} * p.N;
  const int lane = threadIdx.x % kWarp;
  uint64_t any = lane < p.N ? word[lane] : 0;
  if (lane + kWarp < p.N) any |= word[lane + kWarp];
  const uint64_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(any));
  any = low | uint64_t{__reduce_or_sync(~0u, static_cast<uint32_t>(any >> 32))} << 32;
  return any ? p.context[b] + 64 - __clzll(static_cast<long long>(any)) : 0;
}

__global__ void __launch_bounds__(kThreads)
    widen_kernel(const __grid_constant__ WidenLaunch a) {
  const MlaAttentionParams& p = a.p;
  const int b = blockIdx.y, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int seen = seen_slots(p, b), first_page = b * p.max_pages;
  const int32_t* table = p.block_table + first_page;
  for (int run = blockIdx.x * kRun; run < seen; run += gridDim.x * kRun) {
    const int page = run / kPage;
    if (run % kPage == 0 && threadIdx.x == 0) a.table[first_page + page] = first_page + page;
    const int64_t from = int64_t{table[page]} * kPage, to = int64_t{first_page + page} * kPage;
    const int at = run % kPage + warp * kOwn;
    uint4 codes[kOwn], rope[kOwn];
    float scale[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const auto* row = static_cast<const uint8_t*>(p.cache) + (from + at + k) * p.fp8_bytes;
      codes[k] = reinterpret_cast<const uint4*>(row)[lane];
      scale[k] = *scale_of(row, kLatent);
      rope[k] = reinterpret_cast<const uint4*>(rope_of(row, kLatent))[lane % kRopeLanes];
    }
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      auto* row = reinterpret_cast<uint4*>(a.rows + (to + at + k) * kWidth);
      row[2 * lane] = widen_eight({codes[k].x, codes[k].y}, scale[k]);
      row[2 * lane + 1] = widen_eight({codes[k].z, codes[k].w}, scale[k]);
      if (lane < kRopeLanes) row[kLatent / 8 + lane] = rope[k];
    }
  }
}

}  // namespace

void latent_fp8_attention(const MlaAttentionParams& p, Stream stream) {
  if (latent_reads_fp8(p)) return latent_attention(p, stream);
  const int64_t pages = int64_t{p.B} * p.max_pages, bytes = widened_bytes(p.B, p.max_pages);
  auto* rows = static_cast<Bf16*>(p.workspace);
  auto* table = reinterpret_cast<int32_t*>(rows + pages * kPage * kWidth);
  const int runs = p.max_pages * (kPage / kRun);
  const int x = std::clamp(processors() * kBlocksEach / p.B, 1, runs);
  launch(widen_kernel, {dim3(x, p.B), kThreads}, stream, WidenLaunch{p, rows, table});

  MlaAttentionParams widened = p;
  widened.cache = rows;
  widened.block_table = table;
  widened.fp8_bytes = 0;
  widened.workspace = static_cast<char*>(p.workspace) + bytes;
  widened.workspace_bytes = p.workspace_bytes - bytes;
  latent_attention(widened, stream);
}

}  // namespace kdtree::cuda
