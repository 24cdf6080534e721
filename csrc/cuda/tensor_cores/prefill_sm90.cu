// mla_prefill for heads of 128 + 64 features and values of 128 in bf16, by wgmma. For sm_90a.
//
//   out[n, h] = softmax_j<=p(scale * (nope | rotate(rope, p)) . (k[h, j] | k_rope[j])) . v[h],
//   p = keys - N + n
//
// Grid    one block per 128 rows and head: the rows of a head side by side, so that they find its
//         keys in L2, the longest first.
// Tiling  one thread commands the copies; two warpgroups hold 64 rows each, their queries in shared
//         memory, weights and sums in registers. A warpgroup's scores of one tile of 128 keys are
//         multiplied while the values of the tile before are added; nothing orders the two
//         warpgroups, so one's softmax runs beside the other's products.
// Smem    queries and two tiles of keys and of values: 208 KB.
// Floor   2 * H * (P + R + V) flops a row and visible key: 2048 rows of 64 heads after 32,768
//         tokens are 2.8 Tflop. Keys and values from memory about once, from L2 once per 128 rows.
// Needs   q, k, v, k_rope and their rows on 16 bytes.
// Source  order of products and softmax in a warpgroup: FlashAttention-3, arXiv 2407.08608, 3.2.
#include "prefill_sm90.cuh"
#include "tensor_map.cuh"

namespace kdtree::cuda {
namespace {

using namespace prefill_sm90_parts;

struct PrefillTensors {
  CUtensorMap k, k_rope, v;
  MlaPrefillParams p;
};

// Which rows of which head a block has, and how many tiles of keys they see.
struct Share {
  int h, first, tiles;
  __device__ explicit Share(const MlaPrefillParams& p) {
    constexpr int kBlockRows = kGroups * kRows;
    const int blocks = ceil_div(p.N, kBlockRows);
    h = blockIdx.x / blocks;
    first = (blocks - 1 - static_cast<int>(blockIdx.x) % blocks) * kBlockRows;
    tiles = ceil_div(p.keys - p.N + min(first + kBlockRows, p.N), kPrefillTile);
  }
};

// By one thread: the tiles of keys and values, in turn.
__device__ inline void fill_tiles(const PrefillTensors& t, const Smem& s, const Share& share,
                                  Ring<kStages> keys, Ring<kStages> values) {
  tensor_ready(t.k), tensor_ready(t.k_rope), tensor_ready(t.v);
  for (int tile = 0; tile < share.tiles; ++tile, keys.next(), values.next()) {
    const int at = tile * kPrefillTile;
    const uint32_t key = shared_address(s.keys[keys.slot]);
    keys.wait_empty();
    keys.expect(kKeyBoxes * kBox);
    for (int i = 0; i < kNopeBoxes; ++i)
      tensor_copy(key + i * kBox, t.k, i * kBoxWidth, at, share.h, keys.full());
    tensor_copy(key + kNopeBoxes * kBox, t.k_rope, 0, at, 0, keys.full());
    values.wait_empty();
    values.expect(kValueBoxes * kBox);
    for (int i = 0; i < kValueBoxes; ++i)
      tensor_copy(shared_address(s.values[values.slot]) + i * kBox, t.v, i * kBoxWidth, at, share.h,
                  values.full());
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    prefill_sm90_kernel(const __grid_constant__ PrefillTensors t) {
  extern __shared__ __align__(1024) char bytes[];
  Smem& s = *reinterpret_cast<Smem*>(bytes);
  const MlaPrefillParams& p = t.p;
  const Share share(p);
  const Ring<kStages> keys{shared_address(s.key_ring)}, values{shared_address(s.value_ring)};
  if (threadIdx.x == kReaders) {
    keys.init(kReaders / kWarp);
    values.init(kReaders / kWarp);
  }
  __syncthreads();  // the barriers are there
  if (threadIdx.x >= kReaders) {
    give_registers<24>();
    if (threadIdx.x == kReaders) fill_tiles(t, s, share, keys, values);
    return;
  }
  take_registers<240>();
  const int group = threadIdx.x / kGroup, lane = threadIdx.x % kWarp;
  const int first = share.first + group * kRows, row = threadIdx.x % kGroup / kWarp * 16 + lane / 4;
  load_queries(p, share.h, first, s.q[group], 1 + group);
  Reader reader;
  reader.scale = p.scale * kLog2E;
  reader.position = p.keys - p.N + first + row;
  reader.read(s, shared_address(s.q[group]), share.tiles, keys, values);
  reader.write(p, share.h, first + row);
}

}  // namespace

void prefill_sm90(const MlaPrefillParams& p, Stream stream) {
  PrefillTensors t{.p = p};
  const uint64_t keys = p.keys, heads = p.H, e = sizeof(Bf16);
  const auto fits = [&](CUtensorMap& map, const void* at, uint64_t width, uint64_t groups,
                        int64_t row, int64_t head) {
    return describe(map, {.at = at,
                          .sizes = {width, keys, groups},
                          .strides = {row * e, head * e},
                          .box = {kBoxWidth, kPrefillTile, 1},
                          .swizzle = CU_TENSOR_MAP_SWIZZLE_128B});
  };
  const bool fit = fits(t.k, p.k, kPrefillNope, heads, p.k_row, p.k_head) &&
                   fits(t.v, p.v, kPrefillValue, heads, p.v_row, p.v_head) &&
                   fits(t.k_rope, p.k_rope, kPrefillRope, 1, p.rope_row, p.rope_row) &&
                   aligned<Bf16>(p.q, p.q_row);
  if (!fit)
    throw std::runtime_error(
        "kdtree: mla_prefill wants q, k, v, k_rope and their rows on 16 bytes");
  const int blocks = ceil_div(p.N, kGroups * kRows) * p.H;
  launch(prefill_sm90_kernel,
         {.blocks = dim3(blocks),
          .threads = kThreads,
          .smem = smem_up_to<int{sizeof(Smem)}, kSmemSm90>()},
         stream, t);
}

}  // namespace kdtree::cuda
