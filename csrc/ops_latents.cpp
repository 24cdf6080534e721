// The torch face of the ops about the rows of the latent cache: queries in its space, what is appended
// to it and what is moved in it.
#include "ops_attention.h"

namespace kdtree {
namespace {

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
  check_dim("w", w, 1);
  const int64_t T = kv.size(0);
  check_rope(rope, position, T, cache);
  const bool fp8 = cache.scalar_type() == ScalarType::Byte;
  const int64_t R = rope.size(1), C = fp8 ? w.size(0) : cache.size(2) - R;
  require(C > 0, "cache has ", fp8 ? C + R : cache.size(2), " features, wants more than rope's ", R);
  if (fp8) check_fp8(cache, C, R);
  require(kv.size(1) == C + R, "kv has shape ", text(kv.sizes()), ", wants [", T, ", ", C + R, "]");
  require(fp8 || kv.scalar_type() == cache.scalar_type(), "kv has dtype ", kv.scalar_type(),
          ", wants ", cache.scalar_type());
  check_device("kv", kv, cache);
  check("w", w, {C}, kv.scalar_type(), cache);
  check("slot", slot, {T}, ScalarType::Int, cache);
  const DType dtype = dtype_of("kv", kv);
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
      .fp8_bytes = fp8 ? extent("cache", cache.size(2)) : 0,
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
  require(kv.scalar_type() == q.scalar_type(), "kv has dtype ", kv.scalar_type(), ", wants ",
          q.scalar_type());
  require(out.numel() > 0 || query.T == 0, "q has no heads");
  if (query.T > 0) run_on<Launch>(q, MlaQueryAppendParams{query, append});
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
  m.impl("kv_compact", TORCH_BOX(&kv_compact<cpu::kv_compact>));
}

#ifdef KDTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("mla_query", TORCH_BOX(&mla_query<cuda::mla_query>));
  m.impl("mla_append", TORCH_BOX(&mla_append<cuda::mla_append>));
  m.impl("mla_query_append", TORCH_BOX(&mla_query_append<cuda::mla_query_append>));
  m.impl("kv_compact", TORCH_BOX(&kv_compact<cuda::kv_compact>));
}
#endif

}  // namespace kdtree
