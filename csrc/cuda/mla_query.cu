// Queries in the cache's space: the plain kernel for every shape. Of bf16 and at most 512 nope
// features: tensor_cores/short_product.cuh.
//
//   out[t, h] = (w_uk[h] nope[t, h] | rotate(rope[t, h], position[t]))
//
// Grid    one block per kRows rows, kWarps * kOutputs latent features and head; a last slice of the
//         features rotates instead.
// Tiling  a warp owns kOutputs outputs of kRows rows: 32 sums a lane, one a lane after they are
//         summed over the warp. Lane l holds inputs kVec * l .. kVec * l + kVec - 1 of every
//         kWarp * kVec, whatever their alignment, so a sum's order depends on P alone.
// Reads   w_uk once per kRows rows (from L2 after the first: a slice's row blocks run together).
// Floor   H * C * P weights of HBM: 8.4 MB at 64 heads, 512 x 128 bf16, 1.7 us at 4.8 TB/s (H200).
// Needs   nothing; P a multiple of kVec and 8-byte (bf16) or 16-byte (float32) rows are faster.
#include "mla.cuh"
#include "tensor_cores/linear.cuh"
#include "tensor_cores/query_parts.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = 8;
constexpr int kOutputs = kWarp / kRows;  // of a warp: one sum ends in each lane
constexpr int kSlice = kWarps * kOutputs;
constexpr int kVec = 4;  // inputs a lane reads at once

template <class Element>
struct alignas(kVec * sizeof(Element)) Quad {
  Element v[kVec];
};

struct QueryLaunch {
  MlaQueryParams p;
  bool aligned;  // every row of q and w_uk can be read in quads
};

// Inputs i .. i + kVec - 1 of a row of P, zero beyond it.
template <class Element>
__device__ void load(const Element* row, int i, int P, bool aligned, float (&x)[kVec]) {
  if (aligned) {
    Quad<Element> quad = {};
    if (i < P) quad = *reinterpret_cast<const Quad<Element>*>(row + i);
    for (int k = 0; k < kVec; ++k) x[k] = float(quad.v[k]);
  } else {
    for (int k = 0; k < kVec; ++k) x[k] = i + k < P ? float(row[i + k]) : 0.f;
  }
}

template <class Element>
__device__ void rotate_rows(const MlaQueryParams& p, int t0, int h) {
  const int pairs = p.R / 2;
  for (int i = threadIdx.x; i < kRows * pairs; i += kThreads) {
    const int t = t0 + i / pairs, pair = i % pairs;
    if (t >= p.T) return;
    const auto* x = static_cast<const Element*>(p.q) + t * p.q_stride + int64_t{h} * (p.P + p.R);
    auto* y = static_cast<Element*>(p.out) + (int64_t{t} * p.H + h) * (p.C + p.R) + p.C;
    if (p.position[t] < 0) {
      y[2 * pair] = y[2 * pair + 1] = Element(0.f);
    } else {
      const int position = min(p.position[t], p.positions - 1);
      rotate_pair(x + p.P, p.rope + int64_t{position} * p.R, p.R, p.interleaved, pair, y);
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    mla_query_kernel(const __grid_constant__ QueryLaunch a) {
  const MlaQueryParams& p = a.p;
  const int t0 = blockIdx.x * kRows, h = blockIdx.z;
  if (blockIdx.y == gridDim.y - 1) return rotate_rows<Element>(p, t0, h);

  const int lane = threadIdx.x % kWarp;
  const int c0 = blockIdx.y * kSlice + threadIdx.x / kWarp * kOutputs;
  if (c0 >= p.C) return;
  const auto* w = static_cast<const Element*>(p.w_uk) + int64_t{h} * p.C * p.P;
  const auto* q = static_cast<const Element*>(p.q) + int64_t{h} * (p.P + p.R);

  float sum[kWarp] = {};
  for (int i = kVec * lane; i < p.P; i += kVec * kWarp) {
    float x[kRows][kVec] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (t0 + r < p.T) load(q + (t0 + r) * p.q_stride, i, p.P, a.aligned, x[r]);
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      float y[kVec];
      load(w + int64_t{min(c0 + o, p.C - 1)} * p.P, i, p.P, a.aligned, y);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int k = 0; k < kVec; ++k) sum[o * kRows + r] = fmaf(x[r][k], y[k], sum[o * kRows + r]);
    }
  }
  warp_sums(sum);
  const int t = t0 + lane % kRows, c = c0 + lane / kRows;
  if (t >= p.T || c >= p.C) return;
  auto* out = static_cast<Element*>(p.out) + (int64_t{t} * p.H + h) * (p.C + p.R);
  out[c] = Element(p.position[t] < 0 ? 0.f : sum[0]);
}

}  // namespace

void mla_query(const MlaQueryParams& p, Stream stream) {
  if (is_short(p)) return mla_query_short(p, {}, stream);
  const dim3 blocks(ceil_div(p.T, kRows), ceil_div(p.C, kSlice) + 1, p.H);
  dispatch(p.dtype, [&](auto element) {
    using Element = decltype(element);
    const auto address = reinterpret_cast<uintptr_t>(p.q) | reinterpret_cast<uintptr_t>(p.w_uk);
    const bool aligned = address % sizeof(Quad<Element>) == 0 && p.P % kVec == 0 &&
                         (p.P + p.R) % kVec == 0 && p.q_stride % kVec == 0;
    launch(mla_query_kernel<Element>, {blocks, kThreads}, stream, QueryLaunch{p, aligned});
  });
}

// One launch where queries are on tensor cores, whose first blocks append while the others' weights are
// on their way; elsewhere two.
void mla_query_append(const MlaQueryAppendParams& p, Stream stream) {
  if (is_short(p.query) && p.append.C <= kAppendFeatures)
    return mla_query_short(p.query, p.append, stream);
  mla_append(p.append, stream);
  mla_query(p.query, stream);
}

}  // namespace kdtree::cuda
