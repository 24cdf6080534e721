// What the launchers ask of the current device.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "../common.cuh"

namespace kdtree::cuda {

// Of the current device: an attribute.
inline int device_has(cudaDeviceAttr attribute) {
  int device, value;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}
inline int processors() { return device_has(cudaDevAttrMultiProcessorCount); }
// Whether products of many rows are by wgmma here. KDTREE_MMA_SYNC=1: no, as on other cards.
inline bool device_has_wgmma() {
  static const char* forced = std::getenv("KDTREE_MMA_SYNC");
  if (forced && forced[0] == '1') return false;
  return device_has(cudaDevAttrComputeCapabilityMajor) == 9;
}

// Shared memory of a block, from `least` to `most` bytes, of which an SM has room for no more blocks
// than its even share of `blocks`: those of a kernel that begins early would land where the kernel
// before has left room. resident: blocks that an SM's registers have room for
inline int even_smem(int64_t blocks, int resident, int least, int most) {
  constexpr int kReserved = 1024;  // of a block, by the system
  const int share = static_cast<int>((blocks - 1) / processors() + 1);
  if (share >= resident) return least;
  const int all = device_has(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  return std::clamp(all / (share + 1) + 1 - kReserved, least, most);
}

}  // namespace kdtree::cuda
