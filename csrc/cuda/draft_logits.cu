// A drafter's logits, sharpened, and coupled to the noise that the target will draw with.
//
//   y[b, j, v] = (a[j] q + b[j] T g) / (1 + c[j] T), T = temperature[b],
//   q = logits[b, j, v] - logsumexp(logits[b, j]), g = the noise of sample for v at position
//   position[b] + 1 + j
//
// Grid    a cluster of kTeam blocks a row; each reads its share of the row in 16-byte vectors.
// Reads   the row once from HBM, then twice from L1 and L2: for its maximum, its sum of
//         exponentials, and its values. Without noise (T or b[j] 0) none is made.
// Floor   8 * B * J * W bytes of HBM, half of them written: 9.2 MB and 1.9 us at J = 7, W = 163840
//         and 4.8 TB/s (H200). A pass over a block's 20480 ids takes about 2 us, that with the
//         noise about 5 us.
// Needs   W <= 2^24.
#include "early.cuh"
#include "vocab.cuh"

namespace kdtree::cuda {
namespace {

__global__ void __launch_bounds__(kRowThreads)
    draft_logits_kernel(const __grid_constant__ DraftLogitsParams p) {
  begin_early();
  const int64_t t = blockIdx.x / kTeam;
  const int b = t / p.J, j = t % p.J;
  const float* row = p.logits + t * p.W;
  float* y = p.y + t * p.W;

  const float max = value_of(row_best(row, p.W) >> 32);
  const bool finite = fabsf(max) < INFINITY;
  const auto log_sum = static_cast<float>(log_of(team_sum(finite ? share_mass(row, p.W, max) : 0)));
  const float temperature = p.temperature[b], below = 1 + p.c[j] * temperature;
  const float weight = p.a[j] / below, noise_weight = p.b[j] * temperature / below;
  const auto seed = static_cast<uint64_t>(p.seed[b]);
  const auto drawn = static_cast<uint64_t>(int64_t{p.position[b]} + 1 + j);

  for_share(row, p.W, [&](int id, const float (&x)[kQuad]) {
    float noise[kQuad] = {}, value[kQuad];
    if (finite && noise_weight != 0) gumbel(seed, drawn, id / kQuad, noise);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      value[i] = weight * (x[i] - max - log_sum);
      if (noise_weight != 0) value[i] += noise_weight * noise[i];
      if (x[i] == -INFINITY) value[i] = -INFINITY;
      if (!finite) value[i] = NAN;
    }
    if (p.W % kQuad == 0)
      store<true>(y + id, kQuad, value);
    else
      store<false>(y + id, p.W - id, value);
  });
}

}  // namespace

void draft_logits(const DraftLogitsParams& p, Stream stream) {
  const Grid grid{
      .blocks = p.B * p.J * kTeam, .threads = kRowThreads, .cluster = kTeam, .early = true};
  launch(draft_logits_kernel, grid, stream, p);
}

}  // namespace kdtree::cuda
