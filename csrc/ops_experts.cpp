// The torch face of the experts' ops: INT4 packing and product, routing, routed experts.
#include <algorithm>

#include "ops.h"

namespace kdtree {
namespace {

void check_int(const char* name, int64_t value, int64_t least, int64_t most) {
  require(value >= least && value <= most, name, " is ", value, ", wants ", least, " to ", most);
}

int multiple(const char* name, int64_t n) {
  require(n % kInt4Tile == 0, name, " is ", n, ", wants a multiple of ", kInt4Tile);
  return extent(name, n);
}

// The kernels load packed words by 16 bytes.
void check_aligned(const char* name, const Tensor& packed) {
  require(reinterpret_cast<uintptr_t>(data(packed)) % 16 == 0, name, " must start on 16 bytes");
}

template <auto Launch>
std::tuple<Tensor, Tensor> int4_pack(const Tensor codes, const Tensor scale) {
  require(codes.dim() == 2 || codes.dim() == 3, "codes has shape ", text(codes.sizes()),
          ", wants 2 or 3 dimensions");
  const bool bank = codes.dim() == 3;
  const int64_t E = bank ? codes.size(0) : 1, O = codes.size(bank), I = codes.size(bank + 1) * 8;
  const int64_t tile_rows = multiple("O", O) / kInt4Tile, tiles = multiple("I", I) / kInt4Tile;
  const DType dtype = dtype_of("scale", scale);
  if (bank) {
    check("codes", codes, {E, O, I / 8}, ScalarType::Int, codes);
    check("scale", scale, {E, O, tiles}, scale.scalar_type(), codes);
  } else {
    check("codes", codes, {O, I / 8}, ScalarType::Int, codes);
    check("scale", scale, {O, tiles}, scale.scalar_type(), codes);
  }
  const auto tiled = [&](int64_t size, ScalarType type) {
    return bank ? empty(codes, {E, tile_rows, tiles, size}, type)
                : empty(codes, {tile_rows, tiles, size}, type);
  };
  auto packed = tiled(kInt4Words, ScalarType::Int);
  auto packed_scale = tiled(kInt4Tile, scale.scalar_type());
  if (packed.numel() == 0) return {packed, packed_scale};
  run_on<Launch>(codes, Int4PackParams{
                            .codes = data<int32_t>(codes),
                            .scale = data(scale),
                            .packed = mutable_data<int32_t>(packed),
                            .packed_scale = mutable_data(packed_scale),
                            .E = extent("codes", E),
                            .O = extent("codes", O),
                            .I = extent("codes", I),
                            .dtype = dtype,
                        });
  return {packed, packed_scale};
}

template <auto Launch>
Tensor int4_linear(const Tensor x, const Tensor packed, const Tensor scale) {
  check_rows("x", x);
  check_dim("packed", packed, 3);
  const DType dtype = dtype_of("x", x);
  const int I = multiple("I", x.size(1));
  const int64_t tile_rows = packed.size(0), tiles = I / kInt4Tile;
  check("packed", packed, {tile_rows, tiles, kInt4Words}, ScalarType::Int, x);
  check("scale", scale, {tile_rows, tiles, kInt4Tile}, x.scalar_type(), x);
  check_aligned("packed", packed);
  const int64_t O = tile_rows * kInt4Tile;
  auto y = empty(x, {x.size(0), O}, x.scalar_type());
  if (y.numel() == 0) return y;
  run_on<Launch>(x, Int4LinearParams{
                        .x = data(x),
                        .w = data<int32_t>(packed),
                        .scale = data(scale),
                        .y = mutable_data(y),
                        .x_stride = x.stride(0),
                        .T = extent("x", x.size(0)),
                        .O = extent("packed", O),
                        .I = I,
                        .dtype = dtype,
                    });
  return y;
}

template <auto Launch>
std::tuple<Tensor, Tensor> moe_route(const Tensor logits, const std::optional<Tensor> bias,
                                     const std::optional<Tensor> position, int64_t K,
                                     int64_t groups, int64_t kept_groups, std::string scoring,
                                     std::string group_score, bool normalize, double scale) {
  check_dim("logits", logits, 2);
  const int64_t T = logits.size(0), E = logits.size(1);
  check("logits", logits, {T, E}, ScalarType::Float, logits);
  if (bias) check("bias", *bias, {E}, ScalarType::Float, logits);
  if (position) check("position", *position, {T}, ScalarType::Int, logits);
  check_int("experts", E, 1, kMaxExperts);
  check_int("experts_per_token", K, 1, std::min<int64_t>(E, kMaxExpertsPerToken));
  check_int("groups", groups, 1, E);
  require(E % groups == 0, "groups is ", groups, ", wants a divisor of ", E, " experts");
  check_int("kept_groups", kept_groups, 1, groups);
  require(kept_groups * (E / groups) >= K, "experts_per_token is ", K, ", wants at most the ",
          kept_groups * (E / groups), " experts of the kept groups");
  require(scoring == "sigmoid" || scoring == "softmax", "scoring is ", scoring,
          ", wants sigmoid or softmax");
  require(group_score == "sum2" || group_score == "max", "group_score is ", group_score,
          ", wants sum2 or max");
  auto ids = empty(logits, {T, K}, ScalarType::Int);
  auto weights = empty(logits, {T, K}, ScalarType::Float);
  if (T == 0) return {ids, weights};
  run_on<Launch>(logits, MoeRouteParams{
                             .logits = data<float>(logits),
                             .bias = data<float>(bias),
                             .position = data<int32_t>(position),
                             .ids = mutable_data<int32_t>(ids),
                             .weights = mutable_data<float>(weights),
                             .T = extent("logits", T),
                             .E = extent("logits", E),
                             .K = extent("experts_per_token", K),
                             .groups = extent("groups", groups),
                             .kept_groups = extent("kept_groups", kept_groups),
                             .scale = static_cast<float>(scale),
                             .scoring = scoring == "softmax" ? Scoring::softmax : Scoring::sigmoid,
                             .group_sum2 = group_score == "sum2",
                             .normalize = normalize,
                         });
  return {ids, weights};
}

// Checks both banks and returns the expert hidden size F.
int64_t check_banks(const Tensor& x, const Tensor& gate_up, const Tensor& down,
                    const std::optional<Tensor>& gate_up_scale,
                    const std::optional<Tensor>& down_scale) {
  const bool packed = gate_up.scalar_type() == ScalarType::Int;
  check_dim("gate_up", gate_up, packed ? 4 : 3);
  check_dim("down", down, packed ? 4 : 3);
  const int64_t E = gate_up.size(0), D = x.size(1);
  require(E >= 1, "gate_up has shape ", text(gate_up.sizes()), ", wants at least one expert");
  if (!packed) {
    require(!gate_up_scale && !down_scale, "gate_up has dtype ", gate_up.scalar_type(),
            ", wants Int where there are scales");
    const int64_t F = down.size(2);
    check("gate_up", gate_up, {E, 2 * F, D}, x.scalar_type(), x);
    check("down", down, {E, D, F}, x.scalar_type(), x);
    return F;
  }
  require(gate_up_scale && down_scale, "gate_up has dtype Int, wants gate_up_scale and down_scale");
  multiple("D", D);
  const int64_t tiles = D / kInt4Tile, hidden_tiles = down.size(2);
  check("gate_up", gate_up, {E, 2 * hidden_tiles, tiles, kInt4Words}, ScalarType::Int, x);
  check("gate_up_scale", *gate_up_scale, {E, 2 * hidden_tiles, tiles, kInt4Tile}, x.scalar_type(),
        x);
  check("down", down, {E, tiles, hidden_tiles, kInt4Words}, ScalarType::Int, x);
  check("down_scale", *down_scale, {E, tiles, hidden_tiles, kInt4Tile}, x.scalar_type(), x);
  check_aligned("gate_up", gate_up);
  check_aligned("down", down);
  return hidden_tiles * kInt4Tile;
}

template <auto Launch>
Tensor moe_experts(const Tensor x, const Tensor ids, const Tensor weights, const Tensor gate_up,
                   const Tensor down, const std::optional<Tensor> gate_up_scale,
                   const std::optional<Tensor> down_scale, const std::optional<Tensor> shared) {
  check_rows("x", x);
  check_dim("ids", ids, 2);
  const DType dtype = dtype_of("x", x);
  const int64_t T = x.size(0), D = x.size(1), K = ids.size(1);
  check("ids", ids, {T, K}, ScalarType::Int, x);
  check("weights", weights, {T, K}, ScalarType::Float, x);
  const int64_t F = check_banks(x, gate_up, down, gate_up_scale, down_scale);
  if (shared) check("shared", *shared, {T, D}, x.scalar_type(), x);
  require(K >= 1, "ids has shape ", text(ids.sizes()), ", wants at least one expert a row");
  require(F >= 1, "down has shape ", text(down.sizes()), ", wants at least one input");
  auto y = empty(x, {T, D}, x.scalar_type());
  if (y.numel() == 0) return y;
  auto hidden = empty(x, {T, K, F}, x.scalar_type());
  auto partial = empty(x, {T, K, D}, ScalarType::Float);
  auto work = empty(x, {2 + 3 * T * K}, ScalarType::Int);
  extent("ids", T * K);
  run_on<Launch>(x, MoeExpertsParams{
                        .x = data(x),
                        .ids = data<int32_t>(ids),
                        .weights = data<float>(weights),
                        .gate_up = data(gate_up),
                        .gate_up_scale = data(gate_up_scale),
                        .down = data(down),
                        .down_scale = data(down_scale),
                        .shared = data(shared),
                        .hidden = mutable_data(hidden),
                        .partial = mutable_data<float>(partial),
                        .work = mutable_data<int32_t>(work),
                        .y = mutable_data(y),
                        .x_stride = x.stride(0),
                        .T = extent("x", T),
                        .D = extent("x", D),
                        .F = extent("down", F),
                        .E = extent("gate_up", gate_up.size(0)),
                        .K = extent("ids", K),
                        .dtype = dtype,
                    });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kdtree, CPU, m) {
  m.impl("int4_pack", TORCH_BOX(&int4_pack<cpu::int4_pack>));
  m.impl("int4_linear", TORCH_BOX(&int4_linear<cpu::int4_linear>));
  m.impl("moe_route", TORCH_BOX(&moe_route<cpu::moe_route>));
  m.impl("moe_experts", TORCH_BOX(&moe_experts<cpu::moe_experts>));
}

#ifdef KDTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("int4_pack", TORCH_BOX(&int4_pack<cuda::int4_pack>));
  m.impl("int4_linear", TORCH_BOX(&int4_linear<cuda::int4_linear>));
  m.impl("moe_route", TORCH_BOX(&moe_route<cuda::moe_route>));
  m.impl("moe_experts", TORCH_BOX(&moe_experts<cuda::moe_experts>));
}
#endif

}  // namespace kdtree
