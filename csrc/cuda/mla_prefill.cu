// Attention of a chunk of a prompt over its heads' own keys and values.
//
//   out[n, h] = softmax_j<=p(scale * (nope | rotate(rope, p)) . (k[h, j] | k_rope[j])) . v[h],
//   p = keys - N + n
//
// Grid    one block per row and head. A tile of kPrefillTile keys at a time: a thread scores one
//         key, then every thread adds the tile's values of its features.
// Smem    the rotated query in float32, the tile's weights.
// Floor   2 * H * (P + R + V) flops a row and visible key, on CUDA cores. Each row reads its head's
//         keys and values anew: the form for every shape and card, not for speed.
// Needs   nothing: elements are read one by one.
#include "mla.cuh"
#include "tensor_cores/device.cuh"
#include "tensor_cores/prefill.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = kPrefillTile, kWarps = kThreads / kWarp;
constexpr int kMaxFeatures = 1024;  // of P + R, in shared memory
constexpr int kValues = 8;          // of a thread: V is at most kThreads times as many

// By the block: every thread gets the largest x, or the sum in one order.
template <class F>
__device__ inline float reduced(float x, float (&partial)[kWarps], F&& f) {
  for (int d = kWarp / 2; d > 0; d /= 2) x = f(x, __shfl_xor_sync(~0u, x, d));
  __syncthreads();  // those of the call before have been read
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
  __syncthreads();  // the warps' are there
  x = partial[0];
  for (int i = 1; i < kWarps; ++i) x = f(x, partial[i]);
  return x;
}

template <class Element>
__device__ inline float score_of(const MlaPrefillParams& p, const float* q, int h, int key) {
  const auto* k = static_cast<const Element*>(p.k) + h * p.k_head + key * p.k_row;
  const auto* k_rope = static_cast<const Element*>(p.k_rope) + key * p.rope_row;
  float sum = 0;
  for (int i = 0; i < p.P; ++i) sum = fmaf(q[i], float(k[i]), sum);
  for (int i = 0; i < p.R; ++i) sum = fmaf(q[p.P + i], float(k_rope[i]), sum);
  return sum * p.scale;
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    mla_prefill_kernel(const __grid_constant__ MlaPrefillParams p) {
  __shared__ float q[kMaxFeatures], weight[kThreads], partial[kWarps];
  const int n = blockIdx.x / p.H, h = blockIdx.x % p.H, position = p.keys - p.N + n;
  const auto* from = static_cast<const Element*>(p.q) + n * p.q_row + int64_t{h} * (p.P + p.R);
  const float* table = p.rope + int64_t{min(position, p.positions - 1)} * p.R;
  for (int i = threadIdx.x; i < p.P; i += kThreads) q[i] = float(from[i]);
  for (int i = threadIdx.x; i < p.R / 2; i += kThreads) {
    const int low = p.interleaved ? 2 * i : i, high = p.interleaved ? 2 * i + 1 : i + p.R / 2;
    const float a = float(from[p.P + low]), b = float(from[p.P + high]);
    q[p.P + low] = float(Element(a * table[i] - b * table[p.R / 2 + i]));
    q[p.P + high] = float(Element(a * table[p.R / 2 + i] + b * table[i]));
  }
  __syncthreads();  // the query is there

  float top = -INFINITY, mass = 0, sum[kValues] = {};
  for (int first = 0; first <= position; first += kThreads) {
    const int key = first + threadIdx.x, count = min(kThreads, position + 1 - first);
    const float score = key <= position ? score_of<Element>(p, q, h, key) : -INFINITY;
    const float largest =
        fmaxf(top, reduced(score, partial, [](float a, float b) { return fmaxf(a, b); }));
    const float keep = expf(top - largest), own = expf(score - largest);
    weight[threadIdx.x] = own;
    mass = fmaf(mass, keep, reduced(own, partial, [](float a, float b) { return a + b; }));
    top = largest;
    for (int i = 0, c = threadIdx.x; c < p.V; ++i, c += kThreads) {
      const auto* v = static_cast<const Element*>(p.v) + h * p.v_head + first * p.v_row + c;
      float added = 0;
      for (int j = 0; j < count; ++j) added = fmaf(weight[j], float(v[j * p.v_row]), added);
      sum[i] = fmaf(sum[i], keep, added);
    }
    __syncthreads();  // the weights have been read
  }
  auto* to = static_cast<Element*>(p.out) + (int64_t{n} * p.H + h) * p.V;
  for (int i = 0, c = threadIdx.x; c < p.V; ++i, c += kThreads) to[c] = Element(sum[i] / mass);
}

bool on_tensor_cores(const MlaPrefillParams& p) {
  return p.dtype == DType::bf16 && p.P == kPrefillNope && p.R == kPrefillRope &&
         p.V == kPrefillValue && device_has_wgmma();
}

}  // namespace

void mla_prefill(const MlaPrefillParams& p, Stream stream) {
  if (on_tensor_cores(p)) return prefill_sm90(p, stream);
  if (p.P + p.R > kMaxFeatures || p.V > kValues * kThreads)
    throw std::runtime_error("kdtree: mla_prefill wants heads of at most 1024 features");
  dispatch(p.dtype, [&](auto element) {
    launch(mla_prefill_kernel<decltype(element)>,
           {dim3(static_cast<unsigned>(int64_t{p.N} * p.H)), kThreads}, stream, p);
  });
}

}  // namespace kdtree::cuda
