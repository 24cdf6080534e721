// Blocks of a cluster: rank, number, barrier, each other's shared memory. A launch without clusters
// has clusters of one block.
#pragma once

#include "../common.cuh"

namespace kdtree::cuda {

__device__ inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline int cluster_blocks() {
  int blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

// Waits for all threads of all its blocks; what they wrote to shared memory is then seen.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
// In two steps, and only of what stands in registers: it fences no memory.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Where in block `rank` stands what stands at `at` in this one's shared memory.
__device__ inline uint32_t there(uint32_t at, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(at), "r"(rank));
  return address;
}

// v = the four floats that stand in block `rank` where p stands in this one's shared memory.
__device__ inline void load_cluster(const float* p, int rank, float (&v)[4]) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(there(at, rank))
               : "memory");
}

}  // namespace kdtree::cuda
