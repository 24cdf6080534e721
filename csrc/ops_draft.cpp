// The torch face of a block drafter's ops: per op, one function that checks its tensors, allocates
// its outputs and fills a Params; then the registrations.
#include <algorithm>
#include <vector>

#include "ops.h"

namespace kdtree {
namespace {

constexpr int64_t kMaxWorkspace = 256 << 20;  // bytes; more sequences take several launches

// Where the root of each of B sequences is: the last known of its tokens.
void check_root(const Tensor& token, const Tensor& length, int64_t B, const Tensor& like) {
  check_dim("token", token, 2);
  check("token", token, {B, token.size(1)}, ScalarType::Long, like);
  require(token.size(1) > 0, "token has room for none");
  check("length", length, {B}, ScalarType::Int, like);
}

// The rotation table of heads of this width.
void check_turn(const Tensor& rope, int64_t width, const Tensor& like) {
  require(width % 2 == 0, "heads have ", width, " features, wants an even number");
  check_dim("rope", rope, 2);
  check("rope", rope, {rope.size(0), width}, ScalarType::Float, like);
  require(rope.size(0) > 0, "rope has no positions");
}

template <auto Launch>
Tensor block_embed(const Tensor token, const Tensor length, const Tensor table, const Tensor mask,
                   int64_t slots, double scale) {
  check_dim("token", token, 2);
  const int64_t B = token.size(0);
  check_root(token, length, B, token);
  check_dim("table", table, 2);
  const int64_t D = table.size(1);
  check("table", table, {table.size(0), D}, table.scalar_type(), token);
  require(table.size(0) > 0, "table has no rows");
  check("mask", mask, {D}, mask.scalar_type(), token);
  require(slots >= 0, "slots is ", slots, ", wants 0 or more");
  const DType table_dtype = dtype_of("table", table), dtype = dtype_of("mask", mask);
  auto out = empty(mask, {B, slots, D}, mask.scalar_type());
  extent("the block's rows", B * slots);
  if (out.numel() == 0) return out;
  run_on<Launch>(token, BlockEmbedParams{
                            .token = data<int64_t>(token),
                            .length = data<int32_t>(length),
                            .table = data(table),
                            .mask = data(mask),
                            .out = mutable_data(out),
                            .B = extent("token", B),
                            .N = extent("slots", slots),
                            .X = extent("token", token.size(1)),
                            .W = extent("table", table.size(0)),
                            .D = extent("table", D),
                            .scale = static_cast<float>(scale),
                            .table_dtype = table_dtype,
                            .dtype = dtype,
                        });
  return out;
}

// Bytes: per query and run of keys, a weighted sum [width], a largest score and a sum of weights in
// float32; for all sequences, or for as many at a time as fit.
int64_t block_attention_workspace(int64_t B, int64_t N, int64_t H, int64_t S, int64_t width) {
  const int64_t parts = std::min<int64_t>(kBlockParts, (S + N + kBlockTile - 1) / kBlockTile);
  const int64_t sequence = N * H * parts * (width + 2) * static_cast<int64_t>(sizeof(float));
  return sequence * std::min(B, std::max<int64_t>(kMaxWorkspace / sequence, 1));
}

template <auto Launch>
Tensor block_attention(const Tensor qkv, const Tensor q_norm, const Tensor k_norm, double eps,
                       const Tensor rope, const Tensor cache, const Tensor length, int64_t window,
                       bool causal, double scale) {
  check_dim("qkv", qkv, 4);
  check_dim("cache", cache, 5);
  const int64_t B = qkv.size(0), N = qkv.size(1), width = qkv.size(3);
  const int64_t S = cache.size(1), G = cache.size(3), H = qkv.size(2) - 2 * G;
  const ScalarType dtype = qkv.scalar_type();
  check("qkv", qkv, {B, N, qkv.size(2), width}, dtype, qkv);
  check("cache", cache, {B, S, 2, G, width}, dtype, qkv);
  check("q_norm", q_norm, {width}, dtype, qkv);
  check("k_norm", k_norm, {width}, dtype, qkv);
  check_turn(rope, width, qkv);
  check("length", length, {B}, ScalarType::Int, qkv);
  require(G > 0 && H >= 0 && H % G == 0, "qkv has ", qkv.size(2),
          " heads, wants a multiple of the cache's ", G, ", two of them keys and values");
  require(S > 0, "cache has no rows, wants one or more a sequence");
  require(width <= kMaxHead, "qkv has width ", width, ", wants at most ", kMaxHead);
  require(scale > 0, "scale is ", scale, ", wants a number above 0");
  require(window >= 0 && window <= S + 1, "window is ", window, ", wants 0 to ", S + 1,
          ", one more than the cache's rows");
  auto out = empty(qkv, {B, N, H, width}, dtype);
  const DType element = dtype_of("qkv", qkv);
  if (out.numel() == 0) return out;
  extent("cache's and the block's rows", S + N);
  const int64_t bytes = qkv.is_cuda() ? block_attention_workspace(B, N, H, S, width) : 0;
  const auto workspace = empty(qkv, {bytes}, ScalarType::Byte);
  run_on<Launch>(qkv, BlockAttentionParams{
                          .qkv = data(qkv),
                          .q_norm = data(q_norm),
                          .k_norm = data(k_norm),
                          .rope = data<float>(rope),
                          .cache = data(cache),
                          .length = data<int32_t>(length),
                          .out = mutable_data(out),
                          .workspace = mutable_data(workspace),
                          .workspace_bytes = bytes,
                          .B = extent("qkv", B),
                          .N = extent("qkv", N),
                          .S = extent("cache", S),
                          .H = extent("qkv", H),
                          .G = extent("cache", G),
                          .width = extent("qkv", width),
                          .positions = extent("rope", rope.size(0)),
                          .window = static_cast<int>(window),
                          .eps = static_cast<float>(eps),
                          .scale = static_cast<float>(scale),
                          .causal = causal,
                          .dtype = element,
                      });
  return out;
}

template <auto Launch>
void block_append(Tensor cache, const Tensor kv, const Tensor k_norm, double eps, const Tensor rope,
                  const Tensor start, const std::optional<Tensor> path,
                  const std::optional<Tensor> kept, const std::vector<int64_t> rows,
                  int64_t first) {
  check_dim("kv", kv, 6);
  check_dim("cache", cache, 4);
  const int64_t Q = kv.size(0), N = kv.size(1), L = kv.size(2), G = kv.size(4), width = kv.size(5);
  check("kv", kv, {Q, N, L, 2, G, width}, cache.scalar_type(), cache);
  check("cache", cache, {cache.size(0), 2, G, width}, cache.scalar_type(), cache);
  check("k_norm", k_norm, {L, width}, cache.scalar_type(), cache);
  check_turn(rope, width, cache);
  check("start", start, {Q}, ScalarType::Int, cache);
  if (path) check_dim("path", *path, 2);
  const int64_t J = path ? path->size(1) : N;
  if (path) check("path", *path, {Q, J}, ScalarType::Int, cache);
  if (kept) check("kept", *kept, {Q}, ScalarType::Int, cache);
  require(static_cast<int64_t>(rows.size()) == L && L <= kMaxDraftLayers, "rows has ", rows.size(),
          " layers, wants kv's ", L, ", at most ", kMaxDraftLayers);
  BlockAppendParams p{
      .cache = mutable_data(cache),
      .kv = data(kv),
      .k_norm = data(k_norm),
      .rope = data<float>(rope),
      .start = data<int32_t>(start),
      .path = data<int32_t>(path),
      .kept = data<int32_t>(kept),
      .Q = extent("kv", Q),
      .N = extent("kv", N),
      .J = extent("path", J),
      .L = extent("kv", L),
      .G = extent("kv", G),
      .width = extent("kv", width),
      .positions = extent("rope", rope.size(0)),
      .eps = static_cast<float>(eps),
      .dtype = dtype_of("cache", cache),
      .begin = {},
  };
  int64_t sum = 0;
  for (int64_t l = 0; l < L; ++l) {
    require(rows[l] > 0, "rows holds ", rows[l], ", wants one or more a layer");
    p.begin[l + 1] = extent("rows' sum", sum += rows[l]);
  }
  const int64_t sequences = sum ? cache.size(0) / sum : 0;
  require(sequences * sum == cache.size(0), "cache has ", cache.size(0),
          " rows, wants a multiple of ", sum, ", a sequence's");
  require(first >= 0 && first + Q <= sequences, "first is ", first, ", wants 0 to ", sequences - Q);
  p.first = static_cast<int>(first), p.sequences = extent("cache", sequences);
  extent("path's nodes", Q * J);
  if (kv.numel() > 0 && J > 0) run_on<Launch>(cache, p);
}

template <auto Launch>
Tensor block_conv(const Tensor x, const Tensor dynamic, const Tensor base, int64_t slots) {
  check_dim("x", x, 2);
  check_dim("dynamic", dynamic, 3);
  const int64_t T = x.size(0), D = x.size(1), taps = dynamic.size(1), groups = dynamic.size(2);
  check("x", x, {T, D}, x.scalar_type(), x);
  require(dynamic.size(0) == T && dynamic.scalar_type() == x.scalar_type(), "dynamic has shape ",
          text(dynamic.sizes()), " and dtype ", dynamic.scalar_type(), ", wants x's ", T,
          " rows and ", x.scalar_type());
  check_device("dynamic", dynamic, x);
  require((groups <= 1 || dynamic.stride(2) == 1) && (taps <= 1 || dynamic.stride(1) == groups),
          "dynamic must have contiguous rows");
  require(groups > 0 && D % groups == 0, "x has ", D, " channels, wants a multiple of dynamic's ",
          groups);
  check("base", base, {taps, D}, x.scalar_type(), x);
  require(slots > 0 && T % slots == 0, "slots is ", slots, ", wants a divisor of x's ", T, " rows");
  auto y = empty(x, {T, D}, x.scalar_type());
  const DType dtype = dtype_of("x", x);
  if (y.numel() == 0) return y;
  run_on<Launch>(x, BlockConvParams{
                        .x = data(x),
                        .dynamic = data(dynamic),
                        .base = data(base),
                        .y = mutable_data(y),
                        .dynamic_stride = dynamic.stride(0),
                        .T = extent("x", T),
                        .N = extent("slots", slots),
                        .D = extent("x", D),
                        .taps = extent("dynamic", taps),
                        .groups = extent("dynamic", groups),
                        .dtype = dtype,
                    });
  return y;
}

template <auto Launch>
Tensor edge_scores(const Tensor score, const Tensor candidate, const Tensor token,
                   const Tensor length, const Tensor temperature, const Tensor a, const Tensor c,
                   const std::optional<Tensor> more, const std::optional<Tensor> weight,
                   const std::optional<Tensor> direction, const std::optional<Tensor> before,
                   const std::optional<Tensor> after) {
  check_dim("score", score, 3);
  const int64_t B = score.size(0), J = score.size(1), M = score.size(2);
  constexpr auto f32 = ScalarType::Float;
  check("score", score, {B, J, M}, f32, score);
  require(M <= kMaxNodes, "score has width ", M, ", wants at most ", kMaxNodes);
  check("candidate", candidate, {B, J, M}, ScalarType::Long, score);
  check_root(token, length, B, score);
  check("temperature", temperature, {B}, f32, score);
  check("a", a, {J}, f32, score);
  check("c", c, {J}, f32, score);
  if (more) check("more", *more, {B, J, M, M}, f32, score);
  require(direction.has_value() == weight.has_value() &&
              direction.has_value() == before.has_value() &&
              direction.has_value() == after.has_value(),
          "weight, direction, before and after come together or not at all");
  int64_t W = 0, R = 0;
  if (direction) {
    check_dim("before", *before, 2);
    W = before->size(0), R = before->size(1);
    require(W > 0, "before has no rows");
    check("weight", *weight, {J}, f32, score);
    check("direction", *direction, {B, J, R}, f32, score);
    check("before", *before, {W, R}, before->scalar_type(), score);
    check("after", *after, {W, R}, before->scalar_type(), score);
  }
  auto out = empty(score, {B, J, M, M}, f32);
  const DType dtype = before ? dtype_of("before", *before) : DType::f32;
  if (out.numel() == 0) return out;
  run_on<Launch>(score, EdgeScoresParams{
                            .score = data<float>(score),
                            .candidate = data<int64_t>(candidate),
                            .token = data<int64_t>(token),
                            .length = data<int32_t>(length),
                            .temperature = data<float>(temperature),
                            .a = data<float>(a),
                            .c = data<float>(c),
                            .more = data<float>(more),
                            .weight = data<float>(weight),
                            .direction = data<float>(direction),
                            .before = data(before),
                            .after = data(after),
                            .out = mutable_data<float>(out),
                            .B = extent("score", B),
                            .J = extent("score", J),
                            .M = extent("score", M),
                            .X = extent("token", token.size(1)),
                            .W = extent("before", W),
                            .R = extent("before", R),
                            .dtype = dtype,
                        });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kdtree, CPU, m) {
  m.impl("block_embed", TORCH_BOX(&block_embed<cpu::block_embed>));
  m.impl("block_attention", TORCH_BOX(&block_attention<cpu::block_attention>));
  m.impl("block_append", TORCH_BOX(&block_append<cpu::block_append>));
  m.impl("block_conv", TORCH_BOX(&block_conv<cpu::block_conv>));
  m.impl("edge_scores", TORCH_BOX(&edge_scores<cpu::edge_scores>));
}

#ifdef KDTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("block_embed", TORCH_BOX(&block_embed<cuda::block_embed>));
  m.impl("block_attention", TORCH_BOX(&block_attention<cuda::block_attention>));
  m.impl("block_append", TORCH_BOX(&block_append<cuda::block_append>));
  m.impl("block_conv", TORCH_BOX(&block_conv<cuda::block_conv>));
  m.impl("edge_scores", TORCH_BOX(&edge_scores<cuda::edge_scores>));
}
#endif

}  // namespace kdtree
