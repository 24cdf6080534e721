// Where the warps of a cluster's blocks meet, round after round, to read what each has left in its shared
// memory.
#pragma once

#include "ring.cuh"

namespace kdtree::cuda {

// Two barriers at the same place in every block: all have written, all have read.
struct Meeting {
  static constexpr int kBytes = 16;
  uint32_t at;          // in shared memory
  uint32_t parity = 0;  // of the round

  // By one thread, before the cluster's barrier. warps: that meet, of all blocks
  __device__ void init(int warps) const {
    Barrier::init(at, warps);
    Barrier::init(at + 8, warps);
    Barrier::fence_init();
  }

  // What was written in the round before has been read by all; at once in the first round.
  __device__ void wait_left() const { Barrier::wait_for_cluster(at + 8, parity ^ 1); }
  // A warp has written, and waits for the others.
  __device__ void arrive_and_wait() const {
    __syncwarp();
    each_block([&](int rank) { Barrier::arrive_in(rank, at); });
    Barrier::wait_for_cluster(at, parity);
  }
  // A warp has read. The sooner after its last stores the longer the release takes.
  __device__ void leave() {
    __syncwarp();
    each_block([&](int rank) { Barrier::arrive_in(rank, at + 8); });
    parity ^= 1;
  }

 private:
  template <class F>
  static __device__ void each_block(F f) {
    const int lane = threadIdx.x % kWarp;
    if (lane < cluster_blocks()) f(lane);
  }
};

}  // namespace kdtree::cuda
