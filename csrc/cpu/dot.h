// Row-invariant dot products of the CPU kernels, accumulated in float32.
//
// The order of a sum follows from its number of inputs I alone: kDotLanes lanes, lane l over the
// inputs l, l + kDotLanes, ... by fma, start anew with each run of kDotRun inputs; the runs' lanes
// are added up in order; last, the upper half of the lanes is added to the lower until one is left.
// The inputs past the last multiple of 2 * kDotLanes are a run of their own. So a row has the same
// bits alone and in a block, on every thread and in every instruction set, and no term passes more
// than kDotRun / kDotLanes + (I / kDotRun + 2) + log2(kDotLanes) roundings: 74 at I = 18432.
#pragma once

#include "common.h"

namespace kdtree::cpu {

inline constexpr int kDotLanes = 16;    // floats of one zmm or two ymm registers
inline constexpr int kDotRun = 512;     // inputs; near sqrt(kDotLanes * I) for the largest I
inline constexpr int kDotRows = 8;      // rows that share one pass over the weights
inline constexpr int kDotOutputs = 16;  // outputs that share one widened copy of the rows

// y[r][o] = x[r] . w[o] over I inputs, for r < rows <= kDotRows and o < outputs <= kDotOutputs,
// where w[o] starts at w + o * w_stride. X and W are float or bf16 each.
template <class X, class W>
void dot(const X* const* x, int rows, const W* w, int64_t w_stride, int outputs, int I,
         float (*y)[kDotOutputs]);

}  // namespace kdtree::cpu
