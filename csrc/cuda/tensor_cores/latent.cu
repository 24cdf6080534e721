// mla_attention for latents of 512 + 64 features in bf16: which kernel takes the splits, and how many
// rows at a time the workspace holds.
#include <algorithm>

#include "../mla_attention.cuh"
#include "latent.cuh"

namespace kdtree::cuda {
namespace {

// Rows of a sequence from which on a tile of 64 is worth its place: fewer fill the processors better
// 16 at a time, but read the latents once for each 16.
bool wants_wgmma(const LatentJob& job) {
  constexpr int kLongTable = 16384 / kPage;
  return job.rows() > (job.p.max_pages > kLongTable ? 32 : 128);
}

void run(const LatentJob& job, Stream stream) {
  if (!(device_has_wgmma() && wants_wgmma(job) && latent_sm90(job, stream)))
    latent_mma(job, stream);
  latent_merge(job, stream);
}

}  // namespace

void latent_attention(const MlaAttentionParams& p, Stream stream) {
  LatentJob job{.p = p};
  job.parts = splits_of(static_cast<int>(int64_t{p.max_pages} * kPage));
  const auto on_16 = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  job.aligned = on_16(p.q) && on_16(p.cache);
  const int64_t node = int64_t{p.H} * job.parts * kPartial * int64_t{sizeof(float)};
  const int nodes = static_cast<int>(std::min<int64_t>(p.workspace_bytes / node, int64_t{p.B} * p.N));
  job.B = std::max(nodes / p.N, 1), job.N = std::min(nodes, p.N);
  const LatentJob most = job;
  for (job.b = 0; job.b < p.B; job.b += most.B)
    for (job.n = 0; job.n < p.N; job.n += most.N) {
      job.B = std::min(most.B, p.B - job.b), job.N = std::min(most.N, p.N - job.n);
      run(job, stream);
    }
}

}  // namespace kdtree::cuda
