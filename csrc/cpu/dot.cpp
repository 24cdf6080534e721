// The loops over lanes carry `unroll 1`, so that gcc turns each into whole vector instructions
// instead of taking it apart; the loops around them are unrolled, so that the sums stay in
// registers.
#include "dot.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace kdtree::cpu {
namespace {

constexpr int kStep = 2 * kDotLanes;  // inputs: a cache line of bf16, two vectors once widened
constexpr int kLine = 64;             // bytes of a cache line

using Lanes = float[kDotLanes];

// Adds to totals[r][first + o], or sets it to, the lanes of x[r] . w[o] over a run of `count`
// inputs, whole steps. `ahead` is what a later call reads: with few weight rows the hardware sees
// the streams too late.
template <int R, int O, class W>
[[gnu::always_inline]] inline void add_run(const float (*x)[kDotRun], const W* const (&w)[O],
                                           const W* const (&ahead)[O], int count, int first,
                                           bool add, Lanes (*totals)[kDotOutputs]) {
  constexpr bool kPrefetch = O <= 4;
  Lanes sum[R][O] = {};
#pragma GCC unroll 1
  for (int i = 0; i < count; i += kStep)
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
      if constexpr (kPrefetch)
        for (int l = 0; l < kStep; l += kLine / sizeof(W)) __builtin_prefetch(ahead[o] + i + l);
      float wide[kStep];
      const float* b = wide;
      if constexpr (std::is_same_v<W, float>) {
        b = w[o] + i;
      } else {
#pragma GCC unroll 1
        for (int l = 0; l < kStep; ++l) wide[l] = w[o][i + l];
      }
#pragma GCC unroll 2
      for (int half = 0; half < kStep; half += kDotLanes)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 1
          for (int l = 0; l < kDotLanes; ++l)
            sum[r][o][l] = std::fma(x[r][i + half + l], b[half + l], sum[r][o][l]);
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o)
      if (add) {
#pragma GCC unroll 1
        for (int l = 0; l < kDotLanes; ++l) totals[r][first + o][l] += sum[r][o][l];
      } else {
#pragma GCC unroll 1
        for (int l = 0; l < kDotLanes; ++l) totals[r][first + o][l] = sum[r][o][l];
      }
}

// y[o] = the sum of the lanes of totals[o]: the upper half added to the lower until one is left.
[[gnu::always_inline]] inline void sum_lanes(const Lanes* totals, float* y) {
  constexpr int kQuarter = kDotLanes / 4;
  float v[kDotOutputs][kQuarter];
#pragma GCC unroll 1
  for (int o = 0; o < kDotOutputs; ++o) {
    const float* t = totals[o];
#pragma GCC unroll 1
    for (int l = 0; l < kQuarter; ++l)
      v[o][l] = (t[l] + t[l + 2 * kQuarter]) + (t[l + kQuarter] + t[l + 3 * kQuarter]);
  }
#pragma GCC unroll 1
  for (int o = 0; o < kDotOutputs; ++o) y[o] = (v[o][0] + v[o][2]) + (v[o][1] + v[o][3]);
}

// R rows against kDotOutputs weight rows, O at a time, run by run.
template <int R, int O, class X, class W>
[[gnu::always_inline]] inline void dot_block(const X* const* x, const W* const* w, int I,
                                             float (*y)[kDotOutputs]) {
  alignas(kLine) Lanes totals[R][kDotOutputs];
  alignas(kLine) float wide[R][kDotRun];
  alignas(kLine) W last[O][kStep] = {};  // the last inputs, no whole step, and zeros after them
  const int whole = I / kStep * kStep;
#pragma GCC unroll 1
  for (int i = 0, count; i < I; i += count) {
    count = std::min(kDotRun, i < whole ? whole - i : I - i);
    if (i == whole) std::fill_n(wide[0], R * kDotRun, 0.f);
#pragma GCC unroll 1
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 1
      for (int k = 0; k < count; ++k) wide[r][k] = x[r][i + k];
#pragma GCC unroll 1
    for (int first = 0; first < kDotOutputs; first += O) {
      const W *now[O], *ahead[O];
      for (int o = 0; o < O; ++o) {
        const int later = first + o + 2 * O;
        ahead[o] = w[later % kDotOutputs] + i + later / kDotOutputs * kDotRun;
        now[o] = w[first + o] + i;
        if (i < whole) continue;
        std::copy_n(now[o], count, last[o]);
        now[o] = last[o];
      }
      add_run<R, O>(wide, now, ahead, count, first, i > 0, totals);
    }
  }
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) sum_lanes(totals[r], y[r]);
}

// One clone an instruction set, with everything above inlined. At least 8 sums are in flight, which
// hides the latency of fma.
template <class X, class W>
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void dot_padded(int rows, const X* const* x, const W* const* w, int I, float (*y)[kDotOutputs]) {
  if (rows == 1) return dot_block<1, 8>(x, w, I, y);
  if (rows == 2) return dot_block<2, 4>(x, w, I, y);
  if (rows <= 4) return dot_block<4, 2>(x, w, I, y);
  return dot_block<8, 2>(x, w, I, y);
}

}  // namespace

template <class X, class W>
void dot(const X* const* x, int rows, const W* w, int64_t w_stride, int outputs, int I,
         float (*y)[kDotOutputs]) {
  if (I == 0) {
    std::fill_n(y[0], rows * kDotOutputs, 0.f);
    return;
  }
  const X* xs[kDotRows];  // where there are fewer rows or outputs, the last is computed again
  const W* ws[kDotOutputs];
  for (int r = 0; r < kDotRows; ++r) xs[r] = x[std::min(r, rows - 1)];
  for (int o = 0; o < kDotOutputs; ++o) ws[o] = w + std::min(o, outputs - 1) * w_stride;
  float all[kDotRows][kDotOutputs];
  dot_padded(rows, xs, ws, I, all);
  for (int r = 0; r < rows; ++r) std::copy_n(all[r], kDotOutputs, y[r]);
}

template void dot(const float* const*, int, const float*, int64_t, int, int,
                  float (*)[kDotOutputs]);
template void dot(const bf16* const*, int, const bf16*, int64_t, int, int, float (*)[kDotOutputs]);
template void dot(const float* const*, int, const bf16*, int64_t, int, int, float (*)[kDotOutputs]);
template void dot(const bf16* const*, int, const float*, int64_t, int, int, float (*)[kDotOutputs]);

}  // namespace kdtree::cpu
