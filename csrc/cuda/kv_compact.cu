// Cache compaction: the accepted path's rows move to their final slots.
//
//   row(context[b] + i) = row(context[b] + path[b, i]) for i < length[b], in every layer
//
// Grid    one block per (sequence, layer). A thread owns columns of the rows and moves them kMoves
//         rows at a time, all loads before the stores, so no thread waits for another: row i's
//         target lies below every later row's source.
// Floor   2 * L * moved rows * Z elements of HBM: at 61 layers, 576 bf16, 8 rows of 8 sequences
//         9 MB, 2 us at 4.8 TB/s (H200); one sequence is bound by launch latency.
// Needs   nothing: rows move in the largest unit, 16, 4, 2 or 1 bytes, that divides their size and
//         address.
#include "common.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMoves = 16;  // rows in registers; a path of the deepest tree is one such run

template <class Unit>
__global__ void __launch_bounds__(kThreads)
    kv_compact_kernel(const __grid_constant__ KvCompactParams p) {
  begin_early();
  const int b = blockIdx.x, l = blockIdx.y;
  const int units = static_cast<int>(int64_t{p.Z} * p.element_size / int64_t{sizeof(Unit)});
  auto* layer = static_cast<Unit*>(p.cache) + l * p.pages * kPage * units;
  const int32_t* table = p.block_table + int64_t{b} * p.max_pages;
  const int32_t* path = p.path + int64_t{b} * p.J;
  const int length = min(p.length[b], p.J);
  const int context = p.context[b];
  const auto row = [&](int slot) {
    return (int64_t{table[slot / kPage]} * kPage + slot % kPage) * units;
  };

  __shared__ int64_t source[kMoves], target[kMoves];  // offsets; source -1 where nothing moves
  for (int first = 0; first < length; first += kMoves) {
    if (threadIdx.x < kMoves) {
      const int i = first + threadIdx.x;
      const bool moves = i < length && path[i] != i;
      source[threadIdx.x] = moves ? row(context + path[i]) : -1;
      target[threadIdx.x] = moves ? row(context + i) : -1;
    }
    __syncthreads();  // the offsets are there
    for (int u = threadIdx.x; u < units; u += kThreads) {
      Unit held[kMoves];
#pragma unroll
      for (int k = 0; k < kMoves; ++k)
        if (source[k] >= 0) held[k] = layer[source[k] + u];
#pragma unroll
      for (int k = 0; k < kMoves; ++k)
        if (source[k] >= 0) layer[target[k] + u] = held[k];
    }
    __syncthreads();  // the offsets are used up
  }
}

template <class Unit>
bool launch_if_aligned(const KvCompactParams& p, Stream stream) {
  const int64_t row_bytes = int64_t{p.Z} * p.element_size;
  if ((reinterpret_cast<uintptr_t>(p.cache) | row_bytes) % sizeof(Unit) != 0) return false;
  const dim3 blocks(p.B, p.L);
  const Grid grid{.blocks = blocks, .threads = kThreads, .early = true};
  launch(kv_compact_kernel<Unit>, grid, stream, p);
  return true;
}

}  // namespace

void kv_compact(const KvCompactParams& p, Stream stream) {
  launch_if_aligned<uint4>(p, stream) || launch_if_aligned<uint32_t>(p, stream) ||
      launch_if_aligned<uint16_t>(p, stream) || launch_if_aligned<uint8_t>(p, stream);
}

}  // namespace kdtree::cuda
