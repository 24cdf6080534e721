// The device's clock, as a point of a stream or a graph.
//
// Grid    one thread.
// Floor   8 bytes: launch latency.
// Needs   nothing.
#include "common.cuh"
#include "early.cuh"

namespace kdtree::cuda {
namespace {

__global__ void clock_kernel(ClockParams p) {
  begin_early();
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  p.times[p.slot] = static_cast<int64_t>(now);
}

}  // namespace

void clock(const ClockParams& p, Stream stream) {
  launch(clock_kernel, {.blocks = 1, .threads = 1, .early = true}, stream, p);
}

}  // namespace kdtree::cuda
