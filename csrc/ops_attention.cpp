// The torch face of the attention ops: per op, one function that checks its tensors, allocates its
// outputs and fills a Params; then the registrations.
#include <algorithm>

#include "ops.h"

namespace kdtree {
namespace {

constexpr int64_t kMaxWidth = 768;  // of C + R: a tile of float32 latents fills a block's memory
constexpr int64_t kMaxWorkspace = 256 << 20;  // bytes; more rows take several launches

// The rotation table and, per row, a position.
void check_rope(const Tensor& rope, const Tensor& position, int64_t rows, const Tensor& like) {
  check_dim("rope", rope, 2);
  check("rope", rope, {rope.size(0), rope.size(1)}, ScalarType::Float, like);
  require(rope.size(1) % 2 == 0, "rope has ", rope.size(1), " features, wants an even number");
  require(rope.size(0) > 0, "rope has no positions");
  check("position", position, {rows}, ScalarType::Int, like);
}

void check_pages(const char* name, const Tensor& t, int64_t dim) {
  check_dim(name, t, dim);
  require(t.size(dim - 2) == kPage, name, " has pages of ", t.size(dim - 2), " tokens, wants ",
          kPage);
  require(t.is_contiguous(), name, " must be contiguous");
}

void check_table(const Tensor& block_table, int64_t B, const Tensor& like) {
  check_dim("block_table", block_table, 2);
  check("block_table", block_table, {B, block_table.size(1)}, ScalarType::Int, like);
  extent("block_table's tokens", block_table.size(1) * kPage);
}

// The queries' params, their outputs allocated.
std::tuple<Tensor, MlaQueryParams> query_params(const Tensor& q, const Tensor& w_uk,
                                                const Tensor& rope, const Tensor& position,
                                                bool interleaved) {
  check_dim("q", q, 3);
  check_dim("w_uk", w_uk, 3);
  const int64_t T = q.size(0), H = q.size(1), Z = q.size(2), C = w_uk.size(1);
  check_rope(rope, position, T, q);
  const int64_t R = rope.size(1);
  require(Z > R, "q has ", Z, " features, wants more than rope's ", R);
  check("w_uk", w_uk, {H, C, Z - R}, q.scalar_type(), q);
  require((Z <= 1 || q.stride(2) == 1) && (H <= 1 || q.stride(1) == Z),
          "q must have contiguous heads and features");
  const DType dtype = dtype_of("q", q);
  auto out = empty(q, {T, H, C + R}, q.scalar_type());
  return {out, MlaQueryParams{
                   .q = data(q),
                   .w_uk = data(w_uk),
                   .rope = data<float>(rope),
                   .position = data<int32_t>(position),
                   .out = mutable_data(out),
                   .q_stride = q.stride(0),
                   .T = extent("q", T),
                   .H = extent("q", H),
                   .P = extent("q", Z - R),
                   .C = extent("w_uk", C),
                   .R = extent("rope", R),
                   .positions = extent("rope", rope.size(0)),
                   .interleaved = interleaved,
                   .dtype = dtype,
               }};
}

MlaAppendParams append_params(const Tensor& cache, const Tensor& kv, const Tensor& w, double eps,
                              const Tensor& rope, const Tensor& position, const Tensor& slot,
                              bool interleaved) {
  check_pages("cache", cache, 3);
  check_rows("kv", kv);
  const int64_t T = kv.size(0);
  check_rope(rope, position, T, cache);
  const int64_t R = rope.size(1), C = cache.size(2) - R;
  require(C > 0, "cache has ", cache.size(2), " features, wants more than rope's ", R);
  require(kv.size(1) == C + R, "kv has shape ", text(kv.sizes()), ", wants [", T, ", ", C + R, "]");
  require(kv.scalar_type() == cache.scalar_type(), "kv has dtype ", kv.scalar_type(), ", wants ",
          cache.scalar_type());
  check_device("kv", kv, cache);
  check("w", w, {C}, cache.scalar_type(), cache);
  check("slot", slot, {T}, ScalarType::Int, cache);
  const DType dtype = dtype_of("cache", cache);
  return {
      .cache = mutable_data(cache),
      .kv = data(kv),
      .w = data(w),
      .rope = data<float>(rope),
      .position = data<int32_t>(position),
      .slot = data<int32_t>(slot),
      .kv_stride = kv.stride(0),
      .slots = cache.size(0) * kPage,
      .T = extent("kv", T),
      .C = extent("cache", C),
      .R = extent("rope", R),
      .positions = extent("rope", rope.size(0)),
      .eps = static_cast<float>(eps),
      .interleaved = interleaved,
      .dtype = dtype,
  };
}

template <auto Launch>
Tensor mla_query(const Tensor q, const Tensor w_uk, const Tensor rope, const Tensor position,
                 bool interleaved) {
  const auto [out, p] = query_params(q, w_uk, rope, position, interleaved);
  if (out.numel() > 0) run_on<Launch>(q, p);
  return out;
}

template <auto Launch>
void mla_append(Tensor cache, const Tensor kv, const Tensor w, double eps, const Tensor rope,
                const Tensor position, const Tensor slot, bool interleaved) {
  const auto p = append_params(cache, kv, w, eps, rope, position, slot, interleaved);
  if (p.T > 0) run_on<Launch>(cache, p);
}

template <auto Launch>
Tensor mla_query_append(Tensor cache, const Tensor q, const Tensor w_uk, const Tensor kv,
                        const Tensor w, double eps, const Tensor rope, const Tensor position,
                        const Tensor slot, bool interleaved) {
  const auto [out, query] = query_params(q, w_uk, rope, position, interleaved);
  const auto append = append_params(cache, kv, w, eps, rope, position, slot, interleaved);
  require(cache.scalar_type() == q.scalar_type(), "cache has dtype ", cache.scalar_type(),
          ", wants ", q.scalar_type());
  require(out.numel() > 0 || query.T == 0, "q has no heads");
  if (query.T > 0) run_on<Launch>(q, MlaQueryAppendParams{query, append});
  return out;
}

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
  check("cache", cache, {cache.size(0), kPage, Z}, q.scalar_type(), q);
  check_table(block_table, B, q);
  check("context", context, {B}, ScalarType::Int, q);
  if (ancestors) {
    check("ancestors", *ancestors, {B, N}, ScalarType::Long, q);
    require(N <= kMaxNodes, "ancestors has ", N, " nodes, wants at most ", kMaxNodes);
  }
  require(latent > 0 && latent <= Z, "latent is ", latent, ", wants 1 to q's width ", Z);
  require(Z <= kMaxWidth, "q has width ", Z, ", wants at most ", kMaxWidth);
  const int64_t tokens = block_table.size(1) * kPage;
  require(N <= tokens, "block_table holds ", tokens, " tokens, wants at least the ", N, " nodes");
  auto out = empty(q, {B, N, H, latent}, q.scalar_type());
  const DType dtype = dtype_of("q", q);
  if (out.numel() == 0) return out;
  const bool fast = dtype == DType::bf16 && latent == kLatent && Z == kLatent + kRope;
  const int64_t bytes =
      q.is_cuda() ? mla_attention_workspace(B, N, H, latent, block_table.size(1), fast) : 0;
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
                        .dtype = dtype,
                    });
  return out;
}

template <auto Launch>
void kv_compact(Tensor cache, const Tensor block_table, const Tensor context, const Tensor path,
                const Tensor length) {
  check_pages("cache", cache, 4);
  check_dim("path", path, 2);
  const int64_t B = path.size(0), J = path.size(1);
  check("path", path, {B, J}, ScalarType::Int, cache);
  check_table(block_table, B, cache);
  check("context", context, {B}, ScalarType::Int, cache);
  check("length", length, {B}, ScalarType::Int, cache);
  if (cache.numel() == 0 || path.numel() == 0) return;
  run_on<Launch>(cache, KvCompactParams{
                            .cache = mutable_data(cache),
                            .block_table = data<int32_t>(block_table),
                            .context = data<int32_t>(context),
                            .path = data<int32_t>(path),
                            .length = data<int32_t>(length),
                            .pages = cache.size(1),
                            .L = extent("cache", cache.size(0)),
                            .B = extent("path", B),
                            .J = extent("path", J),
                            .Z = extent("cache", cache.size(3)),
                            .max_pages = extent("block_table", block_table.size(1)),
                            .element_size = static_cast<int>(cache.element_size()),
                        });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kdtree, CPU, m) {
  m.impl("mla_query", TORCH_BOX(&mla_query<cpu::mla_query>));
  m.impl("mla_append", TORCH_BOX(&mla_append<cpu::mla_append>));
  m.impl("mla_query_append", TORCH_BOX(&mla_query_append<cpu::mla_query_append>));
  m.impl("mla_attention", TORCH_BOX(&mla_attention<cpu::mla_attention>));
  m.impl("kv_compact", TORCH_BOX(&kv_compact<cpu::kv_compact>));
}

#ifdef KDTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("mla_query", TORCH_BOX(&mla_query<cuda::mla_query>));
  m.impl("mla_append", TORCH_BOX(&mla_append<cuda::mla_append>));
  m.impl("mla_query_append", TORCH_BOX(&mla_query_append<cuda::mla_query_append>));
  m.impl("mla_attention", TORCH_BOX(&mla_attention<cuda::mla_attention>));
  m.impl("kv_compact", TORCH_BOX(&kv_compact<cuda::kv_compact>));
}
#endif

}  // namespace kdtree
