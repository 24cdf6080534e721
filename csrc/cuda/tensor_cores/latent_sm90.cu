// mla_attention's splits for latents of 512 + 64 features in bf16, by wgmma: see latent.cuh. For sm_90a.
//
// Grid    x = (sequence, 64 rows), y = splits, each block walking some of them. It depends on shapes
//         alone; blocks beyond a sequence's context end at once.
// Tiling  one thread commands the copies, two warpgroups take turns: the first scores a tile and
//         weighs it while the second scores the next one, which is weighed while the first tile's
//         latents are added. Both add all tiles, 256 of the 512 features each: 128 registers of sums.
//         A tile's weights stand where its 64 features that are no values have been.
// Smem    q and two tiles: 222 KB.
// Floor   2176 flops a row and position: 64 rows and 64 positions take 1.2 us of a processor's peak;
//         the latents' bytes once per 64 rows, from L2 but for the first.
// Needs   q and cache on 16 bytes; 4 heads, so that a tile's nodes are 15 apart at most.
#include <algorithm>

#include "latent_sm90.cuh"
#include "tensor_map.cuh"

namespace kdtree::cuda {
namespace {

using namespace latent_sm90_parts;

// By one thread: q once, and the tiles of all splits of the block. A split's even tiles have the first
// place, its odd ones the second.
__device__ inline void fill_tiles(const LatentTensors& t, const Smem& s, int b, int first, int most) {
  const LatentJob& job = t.job;
  const MlaAttentionParams& p = job.p;
  const int32_t* table = p.block_table + int64_t{job.b + b} * p.max_pages;
  const int row = ((job.b + b) * p.N + job.n) * p.H + first, splits = splits_of(most);
  const uint32_t q_full = shared_address(&s.q_full), q = shared_address(s.q);
  Place places[] = {{s, 0}, {s, 1}};
  const auto fill = [&](Place& place, int at) {
    const int page = table[at / kPage];
    barrier_wait(place.empty(), place.parity ^ 1);
    barrier_expect(place.full(), kTileBytes);
    for (int i = 0; i < kBoxes; ++i)
      tensor_copy(place.at() + i * kBox, t.cache, i * kBoxWidth, 0, page, place.full());
    place.parity ^= 1;
  };
  barrier_expect(q_full, kTileBytes);
  for (int i = 0; i < kBoxes; ++i)
    tensor_copy(q + i * kBox, t.q, i * kBoxWidth, row, 0, q_full);
  for (int round = 0; round * static_cast<int>(gridDim.y) < splits; ++round) {
    const int part = part_of_round(round, splits);
    if (part < 0) continue;
    const int end = min(split_begin(part + 1), most);
    for (int at = split_begin(part); at < end; at += 2 * kTileKeys) {
      fill(places[0], at);
      if (at + kTileKeys < end) fill(places[1], at + kTileKeys);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    latent_sm90_kernel(const __grid_constant__ LatentTensors t) {
  extern __shared__ __align__(1024) char bytes[];
  Smem& s = *reinterpret_cast<Smem*>(bytes);
  const LatentJob& job = t.job;
  const MlaAttentionParams& p = job.p;
  const int tiles = ceil_div(job.rows(), kRows), b = blockIdx.x / tiles;
  const int first = blockIdx.x % tiles * kRows, rows = min(kRows, job.rows() - first);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (threadIdx.x == kReaders) {
    barrier_init(shared_address(&s.q_full));
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&s.full[i]));
      barrier_init_for(shared_address(&s.empty[i]), kReaders / kWarp);
    }
    barrier_init_fence();
  }
  wait_for_previous();
  let_next_begin();
  if (threadIdx.x < kRows) {
    const int r = threadIdx.x;
    s.body[r] = r < rows ? LatentNode(p, job.b + b, job.n + (first + r) / p.H).body() : 0;
  }
  __syncthreads();  // bodies and barriers are there
  const int most = __reduce_max_sync(~0u, max(s.body[lane], s.body[lane + 32]));
  if (most == 0) return;
  if (threadIdx.x >= kReaders) {
    give_registers<40>();
    if (threadIdx.x == kReaders) fill_tiles(t, s, b, first, most);
    return;
  }
  take_registers<232>();
  const auto read = [&](auto own) {
    Reader<decltype(own)::value> reader{.job = job, .s = s, .places = {{s, 0}, {s, 1}}};
    reader.row = warp % 4 * 16 + lane / 4, reader.lane = lane, reader.scale = p.scale * kLog2E;
    reader.add_splits(b, first, rows, most);
  };
  if (warp < kGroup / kWarp)
    read(std::integral_constant<int, 0>{});
  else
    read(std::integral_constant<int, 1>{});
}

}  // namespace

bool latent_sm90(const LatentJob& job, Stream stream) {
  const MlaAttentionParams& p = job.p;
  if (!job.aligned || p.H < 4) return false;
  LatentTensors t{.job = job};
  const uint64_t width = kWidth, line = 2 * kWidth, all = uint64_t(p.B) * p.N * p.H;
  const Boxes q{.at = p.q, .sizes = {width, all, 1}, .strides = {line, line * all},
                .box = {kBoxWidth, kRows, 1}, .swizzle = CU_TENSOR_MAP_SWIZZLE_128B};
  // The copy engine checks pages against no end: the table names those that are there.
  const Boxes cache{.at = p.cache, .sizes = {width, kPage, uint64_t{1} << 31},
                    .strides = {line, line * kPage}, .box = {kBoxWidth, kPage, 1},
                    .swizzle = CU_TENSOR_MAP_SWIZZLE_128B};
  if (!describe(t.q, q) || !describe(t.cache, cache)) return false;
  if (latent_spread(t, stream)) return true;
  const int x = job.B * ceil_div(job.rows(), kRows);
  const int y = std::min(std::max(processors() / x, 1), job.parts);
  launch(latent_sm90_kernel,
         {.blocks = dim3(x, y),
          .threads = kThreads,
          .smem = smem_up_to<int{sizeof(Smem)}, kSmemSm90>(),
          .early = true},
         stream, t);
  return true;
}

}  // namespace kdtree::cuda
