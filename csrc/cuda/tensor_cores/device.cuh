// What the launchers ask of the current device.
#pragma once

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

}  // namespace kdtree::cuda
