// mla_attention's splits for latents of 512 + 64 features in bf16, by wgmma: see latent.cuh. For sm_90a.
//
// Grid    x = (sequence, 64 rows), y = splits, each block walking some of them. It depends on shapes
//         alone; blocks beyond a sequence's context end at once.
// Tiling  one thread commands the copies, two warpgroups take turns: the first scores a tile and
//         weighs it while the second scores the next one, which is weighed while the first tile's
//         latents are added. Both add all tiles, 256 of the 512 features each: 128 registers of sums.
//         A tile's weights stand where its 64 features that are no values have been. Latents in FP8
//         come by a third warpgroup that widens them instead: latent_widen.cuh.
// Smem    q and two tiles: 222 KB.
// Floor   2176 flops a row and position: 64 rows and 64 positions take 1.2 us of a processor's peak;
//         the latents' bytes once per 64 rows, from L2 but for the first.
// Needs   q and cache on 16 bytes; 4 heads, so that a tile's nodes are 15 apart at most.
#include <algorithm>

#include "../mla_attention.cuh"
#include "latent_widen.cuh"
#include "tensor_map.cuh"

namespace kdtree::cuda {
namespace {

using namespace latent_sm90_parts;

// Calls fill(place, position, end of the split) of the tiles of all splits of the block: a split's even tiles
// have the first place, its odd ones the second.
template <class Fill>
__device__ inline void fill_tiles(const Smem& s, Walk walk, Fill fill) {
  uint32_t parities = 0;
  while (walk.next(kTwoTiles))
#pragma unroll 1
    for (int i = 0; i < 2 && walk.at + i * kTileKeys < walk.end; ++i) {
      fill(Place{s, i, parities >> i & 1}, walk.at + i * kTileKeys, walk.end);
      parities ^= 1 << i;
    }
}

// By one thread.
__device__ inline void load_queries(const LatentTensors& t, const Smem& s, const Rows& rows) {
  const uint32_t full = shared_address(&s.q_full), q = shared_address(s.q);
  Barrier::expect(full, kTileBytes);
  for (int i = 0; i < kBoxes; ++i)
    tensor_copy(q + i * kBox, t.q, i * kBoxWidth, rows.first_query(t.job), 0, full);
}

// By one thread: tiles by the copy engine.
__device__ inline void copy_tiles(const LatentTensors& t, const Smem& s, const Rows& rows, Walk walk) {
  const int32_t* table = table_of(t.job, rows.b);
  const auto fill = [&](const Place& place, int at, int) {
    const int page = table[at / kPage];
    Barrier::wait(place.empty(), place.parity ^ 1);
    Barrier::expect(place.full(), kTileBytes);
    for (int i = 0; i < kBoxes; ++i)
      tensor_copy(place.at() + i * kBox, t.cache, i * kBoxWidth, 0, page, place.full());
  };
  fill_tiles(s, walk, fill);
}

// By a warpgroup: tiles of latents in FP8. What comes two tiles later is fetched to L2 meanwhile.
__device__ inline void widen_tiles(const LatentTensors& t, Smem& s, const Rows& rows, Walk walk) {
  const MlaAttentionParams& p = t.job.p;
  const int32_t* table = table_of(t.job, rows.b);
  const auto fill = [&](const Place& place, int at, int end) {
    const int later = at + kTwoTiles;
    if (threadIdx.x == kReaders && later < end) fetch_page(p, table[later / kPage]);
    widen_tile(p, s, place, table[at / kPage]);
  };
  fill_tiles(s, walk, fill);
}

template <bool kFp8>
__global__ void __launch_bounds__(kThreads, 1)
    latent_sm90_kernel(const __grid_constant__ LatentTensors t) {
  extern __shared__ __align__(1024) char bytes[];
  Smem& s = *reinterpret_cast<Smem*>(bytes);
  const LatentJob& job = t.job;
  const MlaAttentionParams& p = job.p;
  const Rows rows(job, blockIdx.x);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (threadIdx.x == kReaders) {
    Barrier::init(shared_address(&s.q_full), 1);
    for (int i = 0; i < 2; ++i) {
      Barrier::init(shared_address(&s.full[i]), kFp8 ? kGroupWarps : 1);
      Barrier::init(shared_address(&s.empty[i]), kReaders / kWarp);
    }
    Barrier::fence_init();
  }
  wait_for_previous();
  let_next_begin();
  if (threadIdx.x < kRows) {
    const int r = threadIdx.x;
    s.body[r] =
        r < rows.count ? LatentNode(p, job.b + rows.b, job.n + (rows.first + r) / p.H).body() : 0;
  }
  __syncthreads();  // bodies and barriers are there
  const int most = __reduce_max_sync(~0u, max(s.body[lane], s.body[lane + 32]));
  if (most == 0) return;
  const Walk walk{.splits = splits_of(most), .most = most, .round = -1};
  if (threadIdx.x >= kReaders) {
    give_registers<kFp8 ? 88 : 24>();
    if (threadIdx.x == kReaders) load_queries(t, s, rows);
    if constexpr (kFp8)
      widen_tiles(t, s, rows, walk);
    else if (threadIdx.x == kReaders)
      copy_tiles(t, s, rows, walk);
    return;
  }
  take_registers<kFp8 ? 208 : 240>();
  const auto read = [&](auto own) {
    Reader<decltype(own)::value, kFp8 ? 0 : 8> reader{.job = job, .s = s, .places = {{s, 0}, {s, 1}}};
    reader.read(rows, walk);
  };
  if (warp < kGroup / kWarp)
    read(std::integral_constant<int, 0>{});
  else
    read(std::integral_constant<int, 1>{});
}

}  // namespace

int latent_sm90(const LatentJob& job, Stream stream) {
  const MlaAttentionParams& p = job.p;
  if (!job.aligned || p.H < 4) return 0;
  LatentTensors t{.job = job};
  const uint64_t width = kWidth, line = 2 * kWidth, all = uint64_t(p.B) * p.N * p.H;
  const Boxes q{.at = p.q, .sizes = {width, all, 1}, .strides = {line, line * all},
                .box = {kBoxWidth, kRows, 1}, .swizzle = CU_TENSOR_MAP_SWIZZLE_128B};
  // The copy engine checks pages against no end: the table names those that are there.
  const Boxes cache{.at = p.cache, .sizes = {width, kPage, uint64_t{1} << 31},
                    .strides = {line, line * kPage}, .box = {kBoxWidth, kPage, 1},
                    .swizzle = CU_TENSOR_MAP_SWIZZLE_128B};
  if (!describe(t.q, q)) return 0;
  const int x = job.B * ceil_div(job.rows(), kRows);
  const int y = std::min(std::max(processors() / x, 1), job.parts);
  const auto start = [&](auto kernel) {
    launch(kernel,
           {.blocks = dim3(x, y),
            .threads = kThreads,
            .smem = smem_up_to<int{sizeof(Smem)}, kSmemSm90>(),
            .early = true},
           stream, t);
    return x * y;
  };
  if (p.fp8_bytes) return start(latent_sm90_kernel<true>);
  if (!describe(t.cache, cache)) return 0;
  const int busy = latent_spread(t, stream);
  return busy ? busy : start(latent_sm90_kernel<false>);
}

// Where contexts may be long and at most two blocks widen the same rows: else the pass takes no longer.
bool latent_reads_fp8(const MlaAttentionParams& p) {
  constexpr int kTokens = 24576, kRowTiles = 2;
  return device_has_wgmma() && p.H >= 4 && reinterpret_cast<uintptr_t>(p.q) % 16 == 0 &&
         p.max_pages * kPage >= kTokens && ceil_div(p.N * p.H, kRows) <= kRowTiles;
}

}  // namespace kdtree::cuda
