// A ring of stages in shared memory that one thread fills by the copy engine and others empty.
#pragma once

#include "../common.cuh"

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

  // By one thread, before the block's barrier. readers: arrivals that empty a stage
  __device__ void init(int readers) const {
    for (int s = 0; s < kStages; ++s) {
      init(at + 8 * s, 1);
      init(at + 8 * (kStages + s), readers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  __device__ void wait_full() const { wait(full(), parity); }
  __device__ void wait_empty() const { wait(empty(), parity ^ 1); }  // at once in the first round

  // Arrives, and announces bytes that the copy engine will bring.
  __device__ void expect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full()), "r"(bytes)
                 : "memory");
  }
  static __device__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }

 private:
  static __device__ void init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
  }
  static __device__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }
};

}  // namespace kdtree::cuda
