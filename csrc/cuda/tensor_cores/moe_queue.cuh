// Which items a block of moe_experts multiplies: those of its number modulo the number of blocks.
// Its teams of warps take them up one by one, each as soon as it has room, so that they end
// together.
#pragma once

#include "../common.cuh"

namespace kdtree::cuda {

// In shared memory. An item is taken up by whichever warp of the team first asks for it.
template <int kTeams>
struct MoeQueue {
  static constexpr int kAhead = 8;  // more than there are between a team's first and last warp
  static constexpr int kFree = -1, kBusy = -2;
  int taken;
  int item[kTeams][kAhead];

  __device__ void open() {  // by all threads, before a barrier
    if (threadIdx.x == 0) taken = 0;
    for (int i = threadIdx.x; i < kTeams * kAhead; i += blockDim.x)
      item[i / kAhead][i % kAhead] = kFree;
  }
  // The n-th of the team's, numbered among the block's. By a whole warp.
  __device__ int take(int team, int n) {
    int i = 0;
    if (threadIdx.x % kWarp == 0) {
      int* slot = &item[team][n % kAhead];
      do i = atomicCAS(slot, kFree, kBusy);
      while (i == kBusy);
      if (i == kFree) atomicExch(slot, i = atomicAdd(&taken, 1));
    }
    return __shfl_sync(~0u, i, 0);
  }
  // All warps are past the team's n-th. By one thread.
  __device__ void leave(int team, int n) { atomicExch(&item[team][n % kAhead], int{kFree}); }
};

}  // namespace kdtree::cuda
