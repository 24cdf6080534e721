// An mbarrier of shared memory, by its address.
#pragma once

#include "cluster.cuh"

namespace kdtree::cuda {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A phase ends when all arrivals have come, and all bytes that it was told of.
struct Barrier {
  static __device__ void init(uint32_t at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
  }
  // The copy engine sees what was made; other blocks after a barrier of the cluster.
  static __device__ void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  static __device__ void arrive(uint32_t at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
  }
  // At the barrier that stands there in block `rank`: what was done before is seen by those who
  // wait_for_cluster.
  static __device__ void arrive_in(int rank, uint32_t at) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                     there(at, rank))
                 : "memory");
  }
  // Arrives, and tells of bytes that will come.
  static __device__ void expect(uint32_t at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
                 : "memory");
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

// Stores v where `to` stands, and tells `barrier` of its bytes, in the shared memory of block `rank`.
__device__ inline void store_async(const float* to, const uint64_t* barrier, int rank, float2 v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::
          "r"(there(shared_address(to), rank)),
      "f"(v.x), "f"(v.y), "r"(there(shared_address(barrier), rank))
      : "memory");
}
// The same of one float.
__device__ inline void store_async(const float* to, const uint64_t* barrier, int rank, float v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          there(shared_address(to), rank)),
      "f"(v), "r"(there(shared_address(barrier), rank))
      : "memory");
}

}  // namespace kdtree::cuda
