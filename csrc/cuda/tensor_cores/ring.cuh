// A ring of stages in shared memory that one thread fills by the copy engine and others empty.
#pragma once

#include "barrier.cuh"

namespace kdtree::cuda {

// mbarriers of a ring: a stage is full when its bytes have come, empty when all readers have left.
template <int kStages>
struct Ring {
  static constexpr int kBytes = 2 * kStages * 8;
  uint32_t at;          // of the barriers, in shared memory
  int slot = 0;         // the stage whose turn it is
  uint32_t parity = 0;  // of its round

  __device__ uint32_t full() const { return at + 8 * slot; }
  __device__ uint32_t empty() const { return at + 8 * (kStages + slot); }
  __device__ void next() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }

  // The ring at the stage before, whose next turn is a round later.
  __device__ Ring previous() const {
    return slot ? Ring{at, slot - 1, parity ^ 1} : Ring{at, kStages - 1, parity};
  }

  // By one thread, before the block's barrier. readers: arrivals that empty a stage; writers: that
  // fill it
  __device__ void init(int readers, int writers = 1) const {
    for (int s = 0; s < kStages; ++s) {
      Barrier::init(at + 8 * s, writers);
      Barrier::init(at + 8 * (kStages + s), readers);
    }
    Barrier::fence_init();
  }

  __device__ void wait_full() const { Barrier::wait(full(), parity); }
  // At once in the first round.
  __device__ void wait_empty() const { Barrier::wait(empty(), parity ^ 1); }

  // Arrives, and announces bytes that the copy engine will bring.
  __device__ void expect(int bytes) const { Barrier::expect(full(), bytes); }
};

}  // namespace kdtree::cuda
