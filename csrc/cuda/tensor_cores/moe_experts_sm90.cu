// Routed experts, INT4 weights and bf16 rows, by wgmma; many rows an expert. For sm_90a.
//
//   The sums of moe_experts_int4.cu, in its order: a row has the same bits in either form.
//
// Grid    plan_kernel: one block, which sorts the pairs by expert. sm90_kernel: a block a processor;
//         they share the items (group of up to 56 rows of an expert, twelve tile rows at a place).
// Tiling  three warpgroups multiply; the fourth fills the ring (moe_sm90.cuh). A warp multiplies a
//         tile row: twelve of down, or six of the gate and the same six of up. Its tile is a fragment
//         of 16 outputs of two products of the warpgroup, 64 x 8 N rows x 32: while one is on its
//         way, the sums of the other are scaled and added and its next weights turned into bf16.
// Smem    stages of 64 inputs: two tiles of each warp, and all rows' inputs, swizzled as wgmma reads
//         them; the totals of hidden's runs (216 KB).
// Reads   an expert's weights once per group of its rows; rows once per 192 or 384 outputs, from L2.
// Floor   6 T K D F flops: at 2048 rows of Kimi K2 (K = 8) 1.44e12, 2.1 ms at 690 TFLOP/s (an H200);
//         the weights of all 384 experts take 2.1 ms. What this form can reach is 3.2 ms: a product
//         of 64 x 48 x 32 takes an SM 48 cycles, but costs a scheduler 53 instructions (24 of them
//         fma, 18 to make bf16 of codes) and 33 cycles in which A's registers are handed over.
// Needs   packed weights, scales and rows on 16 bytes.
#include "device.cuh"
#include "moe_sm90.cuh"
#include "tensor_map.cuh"
#include "wgmma_registers.cuh"

namespace kdtree::cuda {
namespace {

using namespace moe_sm90;

constexpr int kReaderRegisters = 160, kWriterRegisters = 32;

// The warpgroups that empty the ring.
template <bool kHidden>
struct Reader {
  template <int NT>
  using Sums = float[2][NT][4];  // [outputs 16 * m ..][rows 8 * n ..]
  using Work = Job<kHidden>;

  // A warp's part of the tile rows at a place: the gate's come first, then up's, so that where there
  // are few, whole warpgroups have none.
  struct Share {
    int warps;                      // that have a part
    int matrix, row, slot, output;  // slot: in a stage; output: its first

    __device__ Share(const Work& job, int place, int warp) {
      const int rows = min(Work::kEach, job.rows - place * Work::kEach);
      warps = kHidden ? 2 * rows : rows;
      matrix = kHidden && warp >= rows;
      row = warp < warps ? warp - matrix * rows : 0;
      slot = row + matrix * Work::kEach;
      output = (place * Work::kEach + row) * kInt4Tile;
    }
  };

  const Work& job;
  typename Work::Stages ring;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  __device__ void run() {
    job.template items<!kHidden>([&](const MoeGroup& group, int place) {
      multiply<kRowTiles>(group, place, ceil_div(group.count, kRows));
    });
  }

 private:
  template <int NT>
  __device__ void multiply(const MoeGroup& group, int place, int row_tiles) {
    if constexpr (NT > 1)
      if (row_tiles < NT) return multiply<NT - 1>(group, place, row_tiles);
    const Share share(job, place, warp);
    if (warp / 4 * 4 >= share.warps) return pass_by();
    int pairs[2];  // of rows `lane` and 32 more
    const auto load_pairs = [&] {
      for (int i = 0; i < 2; ++i) pairs[i] = load_pair(job.pair_at(group, lane + i * kWarp));
    };
    Sums<NT> sum = {};
    if (!kHidden) load_pairs();
    products<NT>(share.slot, sum);
    if (kHidden) load_pairs();
    if constexpr (kHidden)
      store_hidden<NT>(pairs, group.count, share);
    else
      store_partial<NT>(pairs, group.count, share, sum);
  }

  static __device__ int load_pair(const int* from) {
    return load_now(reinterpret_cast<const uint32_t*>(from));
  }

  // Of a warpgroup that has nothing to multiply.
  __device__ void pass_by() {
    for (int tile = 0; tile < job.tiles; tile += kDepth) {
      ring.wait_full();
      give_back();
    }
    if (kHidden) meet(), meet();
  }

  // The sums of an item: of down in sum, of hidden, run after run, in smem.total.
  template <int NT>
  __device__ void products(int slot, Sums<NT>& sum) {
    const int length = kHidden ? ceil_div(job.tiles, moe_hidden_runs(job.p)) : job.tiles;
    for (int tile = 0; tile < job.tiles;) {
      const int begin = tile, end = min(job.tiles, begin + length);
      while (tile < end) {
        if (tile % kDepth == 0) {
          for (; tile + kDepth <= end; tile += kDepth) {
            ring.wait_full();
            add_tiles<NT, kDepth>(slot, 0, sum);
            give_back();
          }
          if (tile == end) break;
          ring.wait_full();
        }
        add_tiles<NT, 1>(slot, tile % kDepth, sum);
        if (++tile % kDepth == 0 || tile == job.tiles) give_back();
      }
      if constexpr (kHidden) end_run<NT>(sum, begin == 0);
    }
  }

  __device__ void give_back() {
    __syncwarp();  // all lanes have read it
    if (lane == 0) Barrier::arrive(ring.empty());
    ring.next();
  }

  // sum += tiles j .. of the ring's stage, kCount of them. All has been read when it returns: what is
  // on its way across the end of a loop, the compiler waits for at once.
  template <int NT, int kCount>
  __device__ __forceinline__ void add_tiles(int slot, int j, Sums<NT>& sum) const {
    const Stage& stage = job.smem.stage[ring.slot];
    float part[2][NT][4];  // of outputs 16 * m ..: on its way
    uint32_t a[2][8];
    float scale[2][2];
    const auto add = [&](int m) {
      wgmma_done(part[m], a[m]);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sum[m][n][i] = fmaf(scale[m][i / 2], part[m][n][i], sum[m][n][i]);
    };
#pragma unroll
    for (int i = j; i < j + kCount; ++i) {
      const uint4 code = load_shared(shared_address(&stage.code[slot][i][lane]));
      const uint64_t x = wgmma_operand(shared_address(stage.x) + i * kInt4Tile * int{sizeof(bf16)});
      uint32_t s[2];
      load_scale(shared_address(&stage.scale[slot][i]), s);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t fragment[2][4];
        int4_parts(m ? code.z : code.x, fragment[0]);
        int4_parts(m ? code.w : code.y, fragment[1]);
        if (i > j) wgmma_wait<1>(), add(m);
#pragma unroll
        for (int r = 0; r < 8; ++r) a[m][r] = fragment[r / 4][r % 4];
        scale[m][0] = __uint_as_float(s[m] << 16);
        scale[m][1] = __uint_as_float(s[m] & 0xffff0000);
        wgmma_begin();
        wgmma_tile(part[m], a[m], x);
        wgmma_commit();
      }
    }
    wgmma_wait<1>(), add(0);
    wgmma_wait<0>(), add(1);
  }

  // The scales of a tile's outputs g and g + 8 (low and high half), 16 + g and 24 + g.
  __device__ void load_scale(uint32_t from, uint32_t (&s)[2]) const {
    from += (lane / 8 % 2 * 2 + lane % 2) * int{kRows * sizeof(bf16)};
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(s[0]), "=r"(s[1])
                 : "r"(from)
                 : "memory");
  }

  // total += sum, sum = 0; total is 0 where it is the first.
  template <int NT>
  __device__ void end_run(Sums<NT>& sum, bool first) const {
#pragma unroll
    for (int j = 0; j < 2 * NT; ++j) {
      float (&v)[4] = sum[j / NT][j % NT];
      float4& total = job.smem.total[j][threadIdx.x];
      const float4 t = first ? float4{0, 0, 0, 0} : total;
      total = {t.x + v[0], t.y + v[1], t.z + v[2], t.w + v[3]};
      v[0] = v[1] = v[2] = v[3] = 0;
    }
  }

  static __device__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(kReaders) : "memory"); }

  // The pair of a row, of which lane l knows those of l and 32 + l; by all lanes.
  static __device__ int64_t pair_of(const int (&pairs)[2], int row) {
    const int low = __shfl_sync(~0u, pairs[0], row), high = __shfl_sync(~0u, pairs[1], row);
    return row < kWarp ? low : high;
  }

  // A gate's warp and up's with the same tile row share its rows.
  template <int NT>
  __device__ void store_hidden(const int (&pairs)[2], int count, const Share& share) const {
    meet();  // all totals are there
    const int gate = share.row * kWarp + lane, up = gate + share.warps / 2 * kWarp;
    bf16* to = static_cast<bf16*>(job.p.hidden) + share.output + lane / 4;
#pragma unroll
    for (int i = 0; i < 2 * ceil_div(NT, 2); ++i) {
      const int n = i / 2 * 2 + share.matrix, r = n * kRows + lane % 4 * 2 + i % 2;
      bf16* row = to + pair_of(pairs, r) * job.p.F;
      if (r >= count || warp >= share.warps) continue;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float4 g = job.smem.total[m * NT + n][gate], u = job.smem.total[m * NT + n][up];
        row[16 * m] = gated(i % 2 ? g.y : g.x, i % 2 ? u.y : u.x);
        row[16 * m + 8] = gated(i % 2 ? g.w : g.z, i % 2 ? u.w : u.z);
      }
    }
    meet();  // and have been read
  }

  template <int NT>
  __device__ void store_partial(const int (&pairs)[2], int count, const Share& share,
                                const Sums<NT>& sum) const {
    float* to = job.p.partial + share.output + lane / 4;
#pragma unroll
    for (int i = 0; i < 2 * NT; ++i) {
      const int r = i / 2 * kRows + lane % 4 * 2 + i % 2;
      float* row = to + pair_of(pairs, r) * job.p.D;
      if (r >= count || warp >= share.warps) continue;
#pragma unroll
      for (int q = 0; q < 4; ++q) row[8 * q] = sum[q / 2][i / 2][q % 2 * 2 + i % 2] * kInt4Unit;
    }
  }
};

template <bool kHidden>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_kernel(const __grid_constant__ moe_sm90::Params params) {
  if constexpr (kHasWgmma) {
    using Work = Job<kHidden>;
    extern __shared__ __align__(1024) char bytes[];
    auto& smem = *reinterpret_cast<typename Work::Smem*>(bytes);
    const typename Work::Stages ring{shared_address(&smem.barrier)};
    if (threadIdx.x == 0) Writer<kHidden>::init(ring);
    __syncthreads();
    if (!kHidden) wait_for_previous();
    let_next_begin();
    const Work job(params.p, smem);
    if (threadIdx.x >= kReaders) {
      give_registers<kWriterRegisters>();
      Writer<kHidden>{params, job, ring}.run();
    } else {
      take_registers<kReaderRegisters>();
      Reader<kHidden>{job, ring}.run();
    }
  } else {
    __trap();
  }
}

// Describes the banks of a kernel for boxes of a stage's tiles.
template <bool kHidden>
bool describe(moe_sm90::Params& params) {
  const auto& p = params.p;
  const cuuint64_t tiles = (kHidden ? p.D : p.F) / kInt4Tile,
                   rows = (kHidden ? p.F : p.D) / kInt4Tile;
  const cuuint64_t all = int64_t{p.E} * (kHidden ? 2 : 1);
  const cuuint32_t each = Job<kHidden>::kEach, matrices = kHidden ? 2 : 1;
  return describe_dense(params.code, CU_TENSOR_MAP_DATA_TYPE_INT32, 4, kHidden ? p.gate_up : p.down,
                        {kInt4Words, tiles, rows, all}, {kInt4Words, kDepth, each, matrices}) &&
         describe_dense(params.scale, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                        kHidden ? p.gate_up_scale : p.down_scale, {kInt4Tile, tiles, rows, all},
                        {kInt4Tile, kDepth, each, matrices});
}

}  // namespace

bool moe_products_sm90(const MoeExpertsParams& p, Stream stream) {
  if (!aligned<bf16>(p.gate_up_scale, 0) || !aligned<bf16>(p.down_scale, 0)) return false;
  moe_sm90::Params hidden{.p = p}, down{.p = p};
  if (!describe<true>(hidden) || !describe<false>(down)) return false;
  const auto blocks = static_cast<unsigned>(processors());
  moe_make_plan(p, stream, kBlockRows);
  launch(sm90_kernel<true>, {blocks, kThreads, smem_up_to<sizeof(Job<true>::Smem), kSmemSm90>()},
         stream, hidden);
  launch(sm90_kernel<false>,
         {.blocks = blocks,
          .threads = kThreads,
          .smem = smem_up_to<sizeof(Job<false>::Smem), kSmemSm90>(),
          .early = true},
         stream, down);
  return true;
}

}  // namespace kdtree::cuda
