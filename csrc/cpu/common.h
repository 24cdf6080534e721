// Helpers of the CPU kernels. These kernels are the readable statement of each op: plain loops in a
// fixed order, no intrinsics. Where time matters a loop is written over explicit lanes, so that the
// compiler can vectorise it and the order of its sums still does not depend on the instruction set.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <stdexcept>

#include "../launchers.h"

namespace kdtree::cpu {

struct bf16 {
  uint16_t bits;
  bf16() = default;
  bf16(float f) {  // round to nearest even; NaN stays NaN
    const auto u = std::bit_cast<uint32_t>(f);
    bits = f != f ? 0x7fc0 : static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

// The last of the tokens that sequence b knows, of X at most; the first of them without a length.
inline int64_t root_of(const int64_t* token, const int32_t* length, int X, int b) {
  return token[int64_t{b} * X + (length ? std::clamp(length[b], 1, X) - 1 : 0)];
}

// Calls f(begin, end) on runs that cover 0 .. count - 1, in parallel, at least grain items a run.
// Which thread takes which item must not change any result. ops.cpp implements it by torch's.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& f);

// Calls f(Element{}) for the element type that dtype names.
template <class F>
void dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(bf16{});
  }
  throw std::logic_error("kdtree: unknown dtype");
}

}  // namespace kdtree::cpu
