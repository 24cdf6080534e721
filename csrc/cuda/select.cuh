// The best ids of a row, by radix select over codes that ascend from the best id to the worst.
//
// A code is 8 digits of 8 bits: how far the value lies below the row's maximum, in eighths of a nat
// (linear, so that a row's many small values spread over many bins); then the value's bits; then
// the id. Codes are distinct, so the choice is exact, ties included.
#pragma once

#include "vocab.cuh"

namespace kdtree::cuda {

inline constexpr int kDigit = 8, kBins = 1 << kDigit, kIdBits = 24, kCodeBits = 64;
inline constexpr uint64_t kAllIds = ~uint64_t{0};

__device__ inline uint64_t code_of(float x, float max, int id) {
  constexpr float kBinsPerNat = 8;
  const float below = (max - x) * kBinsPerNat;  // NaN where both are the same infinity
  const uint64_t bin = below < kBins - 1 ? static_cast<int>(below) : kBins - 1;
  return bin << (kCodeBits - kDigit) | uint64_t{~order_key(x)} << kIdBits | id;
}
__device__ inline int id_of(uint64_t code) { return code & ((1 << kIdBits) - 1); }
__device__ inline float value_of_code(uint64_t code) {
  return value_of(~static_cast<uint32_t>(code >> kIdBits));
}

// What the entries of each bin weigh. Weights are added by halves: a 64-bit add in shared memory is
// a loop over compare-and-swap.
struct Histogram {
  uint32_t count[kBins], low[kBins], high[kBins];

  __device__ void clear() {
    for (int i = threadIdx.x; i < kBins; i += kRowThreads) count[i] = low[i] = high[i] = 0;
  }
  __device__ void add(int bin, uint32_t entries, uint64_t weight) {
    const uint32_t half = static_cast<uint32_t>(weight);
    const uint32_t before = atomicAdd(&low[bin], half);
    const uint32_t carried = static_cast<uint32_t>(weight >> 32) + (before + half < before);
    if (carried) atomicAdd(&high[bin], carried);
    atomicAdd(&count[bin], entries);
  }
};

struct Bin {
  int index;
  uint32_t count;    // its entries
  uint64_t before;   // weight of the bins before it
  uint64_t through;  // and its own
};

// The first bin at which the team's histograms reach target. All threads call it.
__device__ inline Bin bin_reaching(Histogram& mine, uint64_t target) {
  constexpr int kRun = kBins / kWarp;  // bins a lane of the scanning warp
  __shared__ uint64_t weight[kBins];
  __shared__ uint32_t count[kBins];
  __shared__ Bin found;
  team().sync();  // the histograms are complete
  for (int i = threadIdx.x; i < kBins; i += kRowThreads) {
    uint64_t w = 0;
    uint32_t c = 0;
    for (int r = 0; r < kTeam; ++r) {
      const Histogram* h = team().map_shared_rank(&mine, r);
      w += uint64_t{h->high[i]} << 32 | h->low[i];
      c += h->count[i];
    }
    weight[i] = w, count[i] = c;
  }
  team().sync();  // they may be cleared; and weight and count are complete
  if (threadIdx.x < kWarp) {
    uint64_t run = 0;
    for (int i = 0; i < kRun; ++i) run += weight[threadIdx.x * kRun + i];
    uint64_t through = run;
    for (int d = 1; d < kWarp; d *= 2) {
      const uint64_t left = __shfl_up_sync(~0u, through, d);
      if (threadIdx.x >= d) through += left;
    }
    uint64_t before = through - run;
    if (before < target && target <= through) {
      int i = threadIdx.x * kRun;
      while (before + weight[i] < target) before += weight[i++];
      found = {i, count[i], before, before + weight[i]};
    }
  }
  __syncthreads();
  return found;
}

// The last code of the fewest best ids whose weights reach target. entry(id, x, code, weight) says
// whether an id takes part, with what code and weight. unit: all weights are 1.
template <class Entry>
__device__ uint64_t last_code(const float* row, int W, uint64_t target, bool unit, Entry entry) {
  __shared__ Histogram histogram;
  uint64_t prefix = 0;  // the digits of the last code that are known
  for (int shift = kCodeBits - kDigit;; shift -= kDigit) {
    histogram.clear();
    __syncthreads();
    int run_bin = 0;  // a run of entries of one bin is added at once
    uint32_t run_count = 0;
    uint64_t run_weight = 0;
    for_share(row, W, [&](int id, const float (&x)[kQuad]) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        uint64_t code, weight;
        if (!entry(id + i, x[i], code, weight)) continue;
        if (shift < kCodeBits - kDigit && (code ^ prefix) >> (shift + kDigit)) continue;
        const int bin = code >> shift & (kBins - 1);
        if (bin != run_bin) {
          if (run_count) histogram.add(run_bin, run_count, run_weight);
          run_bin = bin, run_count = 0, run_weight = 0;
        }
        ++run_count, run_weight += weight;
      }
    });
    if (run_count) histogram.add(run_bin, run_count, run_weight);
    const Bin bin = bin_reaching(histogram, target);
    prefix |= static_cast<uint64_t>(bin.index) << shift;
    if (shift == 0) return prefix;
    // One entry, or all of them: what the lower digits are does not matter.
    if (bin.count == 1 || (unit && bin.through == target))
      return prefix | ((uint64_t{1} << shift) - 1);
    target -= bin.before;
  }
}

}  // namespace kdtree::cuda
