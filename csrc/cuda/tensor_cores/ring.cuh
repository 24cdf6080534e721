// A ring of stages in shared memory that one thread fills by the copy engine and others empty.
#pragma once

#include "../common.cuh"

namespace kdtree::cuda {

// An mbarrier of shared memory, by its address.
struct Barrier {
  static __device__ void init(uint32_t at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
  }
  static __device__ void fence_init() {  // the copy engine and other blocks see what was made
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  static __device__ void wait(uint32_t at, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(at),
        "r"(parity)
        : "memory");
  }
  // And sees what other blocks of the cluster wrote before they arrived.
  static __device__ void wait_for_cluster(uint32_t at, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(at),
        "r"(parity)
        : "memory");
  }
};

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
  __device__ void expect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full()), "r"(bytes)
                 : "memory");
  }
  static __device__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
};

}  // namespace kdtree::cuda
