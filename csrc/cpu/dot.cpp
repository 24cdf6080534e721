// The loops over lanes carry `unroll 1`, so that gcc turns each into one vector instruction instead
// of taking it apart; the loops around them are unrolled, so that the sums stay in registers.
#include "dot.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace kdtree::cpu {
namespace {

using Lanes = float[kDotLanes];
using Run = float[kDotRun];

// Points wide[n] at `count` inputs of rows[n] in float32, followed by zeros up to whole lanes: the row
// itself or a copy. The rows advance together, so that a prefetcher sees N even streams.
template <int N, class Element>
[[gnu::always_inline]] inline void widen(const Element* const* rows, int begin, int count,
                                         Run* copy, const float** wide) {
  const int whole = count / kDotLanes * kDotLanes;
  if constexpr (std::is_same_v<Element, float>) {
    if (whole == count) {
      for (int n = 0; n < N; ++n) wide[n] = rows[n] + begin;
      return;
    }
  }
  constexpr int kStep = 2 * kDotLanes;  // a cache line of bf16
  const int steps = count / kStep * kStep;
#pragma GCC unroll 1
  for (int i = 0; i < steps; i += kStep)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 1
      for (int l = 0; l < kStep; ++l) copy[n][i + l] = rows[n][begin + i + l];
#pragma GCC unroll 1
  for (int n = 0; n < N; ++n) {
    wide[n] = copy[n];
    if (steps == count) continue;
#pragma GCC unroll 1
    for (int l = 0; l < kStep; ++l)
      copy[n][steps + l] = steps + l < count ? float(rows[n][begin + steps + l]) : 0.f;
  }
}

// The lanes of one run of R rows and O outputs; the first run sets the totals, the others add.
template <int R, int O>
[[gnu::always_inline]] inline void add_run(const float* const* x, const float* const* w, int count,
                                           bool first, Lanes (*totals)[kDotOutputs], int at) {
  Lanes sum[R][O] = {};
#pragma GCC unroll 1
  for (int i = 0; i < count; i += kDotLanes)
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 1
        for (int l = 0; l < kDotLanes; ++l)
          sum[r][o][l] = std::fma(x[r][i + l], w[o][i + l], sum[r][o][l]);
  if (first) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o)
#pragma GCC unroll 1
        for (int l = 0; l < kDotLanes; ++l) totals[r][at + o][l] = sum[r][o][l];
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o)
#pragma GCC unroll 1
        for (int l = 0; l < kDotLanes; ++l) totals[r][at + o][l] += sum[r][o][l];
  }
}

[[gnu::always_inline]] inline float tree_sum(Lanes& v) {
#pragma GCC unroll 1
  for (int l = 0; l < 8; ++l) v[l] += v[l + 8];
#pragma GCC unroll 1
  for (int l = 0; l < 4; ++l) v[l] += v[l + 4];
  return (v[0] + v[2]) + (v[1] + v[3]);
}

// R rows and kDotOutputs outputs, O outputs at a time.
template <int R, int O, class X, class W>
[[gnu::always_inline]] inline void dot_block(const X* const* x, const W* const* w, int I,
                                             float (*y)[kDotOutputs]) {
  alignas(64) Lanes totals[R][kDotOutputs];
  alignas(64) Run copy_x[R], copy_w[O];
  const float *wide_x[R], *wide_w[O];
#pragma GCC unroll 1
  for (int i = 0; i < I; i += kDotRun) {
    const int count = std::min(kDotRun, I - i);
    widen<R>(x, i, count, copy_x, wide_x);
#pragma GCC unroll 1
    for (int o = 0; o < kDotOutputs; o += O) {
      widen<O>(w + o, i, count, copy_w, wide_w);
      add_run<R, O>(wide_x, wide_w, count, i == 0, totals, o);
    }
  }
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 1
    for (int o = 0; o < kDotOutputs; ++o) y[r][o] = tree_sum(totals[r][o]);
}

// One clone an instruction set, with everything above inlined. 8 sums in flight hide the latency of
// fma.
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
  const X* xs[kDotRows];
  const W* ws[kDotOutputs];
  for (int r = 0; r < kDotRows; ++r) xs[r] = x[std::min(r, rows - 1)];
  for (int o = 0; o < kDotOutputs; ++o) ws[o] = w + std::min(o, outputs - 1) * w_stride;
  float all[kDotRows][kDotOutputs];
  dot_padded(rows, xs, ws, I, all);
  for (int r = 0; r < rows; ++r) std::copy_n(all[r], kDotOutputs, y[r]);
}

template void dot(const float* const*, int, const float*, int64_t, int, int, float (*)[kDotOutputs]);
template void dot(const bf16* const*, int, const bf16*, int64_t, int, int, float (*)[kDotOutputs]);
template void dot(const bf16* const*, int, const float*, int64_t, int, int, float (*)[kDotOutputs]);

}  // namespace kdtree::cpu
