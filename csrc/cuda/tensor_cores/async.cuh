// Bulk copies onto barriers of shared memory, clusters of blocks (sm_90 on).
#pragma once

#include "../common.cuh"
#include "early.cuh"

namespace kdtree::cuda {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A barrier's phase ends when its one arrival and the bytes it was told of have come.
__device__ inline void barrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_init_fence() {  // other blocks see it, after cluster_arrive<true>
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_expect(uint32_t barrier, int bytes) {  // and arrives
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

__device__ inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// A block arrives once all its threads have; the wait is for all blocks of the cluster. What they
// wrote before is seen after only where they `release` it, which takes as long as a fence of the
// whole device.
template <bool kRelease = false>
__device__ inline void cluster_arrive() {
  if constexpr (kRelease)
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  else
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Stores v where `to` stands, and tells `barrier` of its bytes, in the shared memory of block `rank`.
__device__ inline void store_async(const float* to, const uint64_t* barrier, int rank, float2 v) {
  uint32_t at, told;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(to)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(told)
      : "r"(shared_address(barrier)), "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::
          "r"(at),
      "f"(v.x), "f"(v.y), "r"(told)
      : "memory");
}
// The same of one float.
__device__ inline void store_async(const float* to, const uint64_t* barrier, int rank, float v) {
  uint32_t at, told;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(to)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(told)
      : "r"(shared_address(barrier)), "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(at),
      "f"(v), "r"(told)
      : "memory");
}

}  // namespace kdtree::cuda
