// The torch face of the attentions of the model: per op, one function that checks its tensors, allocates its
// outputs and fills a Params; then the registrations.
#include <algorithm>

#include "ops_attention.h"

namespace kdtree {
namespace {

constexpr int64_t kMaxWidth = 768;  // of C + R: a tile of float32 latents fills a block's memory
constexpr int64_t kMaxWorkspace = 256 << 20;  // bytes; more rows take several launches

// Bytes: per row and split, and for the tail, a weighted sum [C], a largest score and a sum of
// weights in float32; for all rows, or for as many at a time as fit. latent: kLatent + kRope in bf16,
// where the tail needs none
int64_t mla_attention_workspace(int64_t B, int64_t N, int64_t H, int64_t C, int64_t max_pages,
                                bool latent) {
  if (latent) {
    const int64_t node = H * latent_splits(max_pages * kPage) * kLatentPart;
    return node * std::min(B * N, std::max<int64_t>(kMaxWorkspace / node, 1));
  }
  const int64_t parts = (max_pages * kPage + kSplit - 1) / kSplit + 1;
  const int64_t block = kHeadBlock * parts * (C + 2) * static_cast<int64_t>(sizeof(float));
  const int64_t blocks = B * N * ((H + kHeadBlock - 1) / kHeadBlock);
  return block * std::min(blocks, std::max<int64_t>(kMaxWorkspace / block, 1));
}

template <auto Launch>
Tensor mla_attention(const Tensor q, const Tensor cache, const Tensor block_table,
                     const Tensor context, const std::optional<Tensor> ancestors, int64_t latent,
                     double scale) {
  check_dim("q", q, 4);
  const int64_t B = q.size(0), N = q.size(1), H = q.size(2), Z = q.size(3);
  check("q", q, {B, N, H, Z}, q.scalar_type(), q);
  check_pages("cache", cache, 3);
  const bool fp8 = cache.scalar_type() == ScalarType::Byte;
  if (fp8) check_device("cache", cache, q);
  else check("cache", cache, {cache.size(0), kPage, Z}, q.scalar_type(), q);
  check_table(block_table, B, q);
  check("context", context, {B}, ScalarType::Int, q);
  if (ancestors) {
    check("ancestors", *ancestors, {B, N}, ScalarType::Long, q);
    require(N <= kMaxNodes, "ancestors has ", N, " nodes, wants at most ", kMaxNodes);
  }
  require(latent > 0 && latent <= Z, "latent is ", latent, ", wants 1 to q's width ", Z);
  if (fp8) check_fp8(cache, latent, Z - latent);
  require(Z <= kMaxWidth, "q has width ", Z, ", wants at most ", kMaxWidth);
  const int64_t tokens = block_table.size(1) * kPage;
  require(N <= tokens, "block_table holds ", tokens, " tokens, wants at least the ", N, " nodes");
  auto out = empty(q, {B, N, H, latent}, q.scalar_type());
  const DType dtype = dtype_of("q", q);
  if (out.numel() == 0) return out;
  const bool fast = dtype == DType::bf16 && latent == kLatent && Z == kLatent + kRope;
  const int64_t pages = block_table.size(1);
  const int64_t bytes = !q.is_cuda() ? 0
                                     : mla_attention_workspace(B, N, H, latent, pages, fast) +
                                           (fast && fp8 ? widened_bytes(B, pages) : 0);
  const auto workspace = empty(q, {bytes}, ScalarType::Byte);
  run_on<Launch>(q, MlaAttentionParams{
                        .q = data(q),
                        .cache = data(cache),
                        .block_table = data<int32_t>(block_table),
                        .context = data<int32_t>(context),
                        .ancestors = data<int64_t>(ancestors),
                        .out = mutable_data(out),
                        .workspace = mutable_data(workspace),
                        .workspace_bytes = bytes,
                        .B = extent("q", B),
                        .N = extent("q", N),
                        .H = extent("q", H),
                        .C = extent("latent", latent),
                        .R = extent("q", Z - latent),
                        .max_pages = extent("block_table", block_table.size(1)),
                        .scale = static_cast<float>(scale),
                        .fp8_bytes = fp8 ? extent("cache", cache.size(2)) : 0,
                        .dtype = dtype,
                    });
  return out;
}

template <auto Launch>
Tensor mla_prefill(const Tensor q, const Tensor k, const Tensor v, const Tensor k_rope,
                   const Tensor rope, bool interleaved, double scale) {
  check_dim("q", q, 3);
  check_dim("k", k, 3);
  check_dim("v", v, 3);
  check_rope(rope, q);
  const int64_t N = q.size(0), H = q.size(1), keys = k.size(1), P = k.size(2), R = rope.size(1);
  const int64_t V = v.size(2);
  check_features("q", q, {N, H, P + R}, q);
  require(H <= 1 || q.stride(1) == P + R, "q must have contiguous heads");
  check_features("k", k, {H, keys, P}, q);
  check_features("v", v, {H, keys, V}, q);
  check_features("k_rope", k_rope, {keys, R}, q);
  require(keys >= N, "k has ", keys, " keys, wants at least q's ", N, " rows");
  require(scale > 0, "scale is ", scale, ", wants a positive number");
  auto out = empty(q, {N, H, V}, q.scalar_type());
  const DType dtype = dtype_of("q", q);
  if (out.numel() == 0) return out;
  run_on<Launch>(q, MlaPrefillParams{
                        .q = data(q),
                        .k = data(k),
                        .v = data(v),
                        .k_rope = data(k_rope),
                        .rope = data<float>(rope),
                        .out = mutable_data(out),
                        .q_row = q.stride(0),
                        .k_row = k.stride(1),
                        .k_head = k.stride(0),
                        .v_row = v.stride(1),
                        .v_head = v.stride(0),
                        .rope_row = k_rope.stride(0),
                        .N = extent("q", N),
                        .H = extent("q", H),
                        .keys = extent("k", keys),
                        .P = extent("k", P),
                        .R = extent("rope", R),
                        .V = extent("v", V),
                        .positions = extent("rope", rope.size(0)),
                        .scale = static_cast<float>(scale),
                        .interleaved = interleaved,
                        .dtype = dtype,
                    });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kdtree, CPU, m) {
  m.impl("mla_attention", TORCH_BOX(&mla_attention<cpu::mla_attention>));
  m.impl("mla_prefill", TORCH_BOX(&mla_prefill<cpu::mla_prefill>));
}

#ifdef KDTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("mla_attention", TORCH_BOX(&mla_attention<cuda::mla_attention>));
  m.impl("mla_prefill", TORCH_BOX(&mla_prefill<cuda::mla_prefill>));
}
#endif

}  // namespace kdtree
