// The torch face of the tree ops: per op, one function that checks its tensors, allocates its
// outputs and fills a Params; then the registrations.
#include <algorithm>

#include "ops.h"

namespace kdtree {
namespace {

constexpr int64_t kMaxBest = 64;             // a draft tree's width at most
constexpr int64_t kMaxVocabulary = 1 << 24;  // so that a row's mass fits 64 bits: cpu/vocab.h

void check_float(const char* name, const Tensor& t) {
  require(t.scalar_type() == ScalarType::Float, name, " has dtype ", t.scalar_type(),
          ", wants Float");
  require(t.is_contiguous(), name, " must be contiguous");
}

void check_vocabulary(int64_t W) {
  require(W >= 1 && W <= kMaxVocabulary, "logits has ", W, " columns, wants 1 to ", kMaxVocabulary);
}

template <auto Launch>
Tensor draft_logits(const Tensor logits, const Tensor position, const Tensor seed,
                    const Tensor temperature, const Tensor a, const Tensor b, const Tensor c) {
  check_dim("logits", logits, 3);
  check_float("logits", logits);
  const int64_t B = logits.size(0), J = logits.size(1), W = logits.size(2);
  check_vocabulary(W);
  extent("logits", B * J);
  check("position", position, {B}, ScalarType::Int, logits);
  check("seed", seed, {B}, ScalarType::Long, logits);
  check("temperature", temperature, {B}, ScalarType::Float, logits);
  check("a", a, {J}, ScalarType::Float, logits);
  check("b", b, {J}, ScalarType::Float, logits);
  check("c", c, {J}, ScalarType::Float, logits);
  auto y = empty(logits, {B, J, W}, ScalarType::Float);
  if (B * J == 0) return y;
  run_on<Launch>(logits, DraftLogitsParams{
                             .logits = data<float>(logits),
                             .position = data<int32_t>(position),
                             .seed = data<int64_t>(seed),
                             .temperature = data<float>(temperature),
                             .a = data<float>(a),
                             .b = data<float>(b),
                             .c = data<float>(c),
                             .y = mutable_data<float>(y),
                             .B = extent("logits", B),
                             .J = extent("logits", J),
                             .W = extent("logits", W),
                         });
  return y;
}

template <auto Launch>
std::tuple<Tensor, Tensor> top_logprobs(const Tensor logits, int64_t k) {
  check_dim("logits", logits, 2);
  check_float("logits", logits);
  const int64_t T = logits.size(0), W = logits.size(1), most = std::min(W, kMaxBest);
  check_vocabulary(W);
  require(k >= 1 && k <= most, "k is ", k, ", wants 1 to ", most);
  auto logprob = empty(logits, {T, k}, ScalarType::Float);
  auto id = empty(logits, {T, k}, ScalarType::Long);
  if (T == 0) return {logprob, id};
  run_on<Launch>(logits, TopLogprobsParams{
                             .logits = data<float>(logits),
                             .logprob = mutable_data<float>(logprob),
                             .id = mutable_data<int64_t>(id),
                             .T = extent("logits", T),
                             .W = extent("logits", W),
                             .k = static_cast<int>(k),
                         });
  return {logprob, id};
}

template <auto Launch>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tree_build(const Tensor score,
                                                              const Tensor candidate,
                                                              const Tensor root, int64_t budget,
                                                              bool chain_seed,
                                                              const std::optional<Tensor> active,
                                                              const std::optional<Tensor> length) {
  check_dim("candidate", candidate, 3);
  const int64_t B = candidate.size(0), J = candidate.size(1), M = candidate.size(2);
  require(J <= kMaxDepth, "candidate has depth ", J, ", wants at most ", kMaxDepth);
  require(M <= kMaxNodes, "candidate has width ", M, ", wants at most ", kMaxNodes);
  require(budget >= 0 && budget < kMaxNodes, "budget is ", budget, ", wants 0 to ", kMaxNodes - 1);
  const bool edges = score.dim() == 4;
  if (edges)
    check("score", score, {B, J, M, M}, ScalarType::Float, candidate);
  else
    check("score", score, {B, J, M}, ScalarType::Float, candidate);
  check("candidate", candidate, {B, J, M}, ScalarType::Long, score);
  const int64_t X = length && root.dim() == 2 ? root.size(1) : 1;
  if (length) {
    check("root", root, {B, X}, ScalarType::Long, score);
    check("length", *length, {B}, ScalarType::Int, score);
    require(X > 0, "root has room for none");
  } else {
    check("root", root, {B}, ScalarType::Long, score);
  }
  if (active) check("active", *active, {B}, ScalarType::Bool, score);
  const int64_t N = budget + 1;
  auto token = empty(score, {B, N}, ScalarType::Long);
  auto parent = empty(score, {B, N}, ScalarType::Int);
  auto depth = empty(score, {B, N}, ScalarType::Int);
  auto ancestors = empty(score, {B, N}, ScalarType::Long);
  auto node_score = empty(score, {B, N}, ScalarType::Float);
  if (B == 0) return {token, parent, depth, ancestors, node_score};
  run_on<Launch>(score, TreeBuildParams{
                            .score = data<float>(score),
                            .candidate = data<int64_t>(candidate),
                            .root = data<int64_t>(root),
                            .length = data<int32_t>(length),
                            .active = data<bool>(active),
                            .token = mutable_data<int64_t>(token),
                            .parent = mutable_data<int32_t>(parent),
                            .depth = mutable_data<int32_t>(depth),
                            .ancestors = mutable_data<int64_t>(ancestors),
                            .node_score = mutable_data<float>(node_score),
                            .B = extent("candidate", B),
                            .N = static_cast<int>(N),
                            .J = static_cast<int>(J),
                            .M = static_cast<int>(M),
                            .X = extent("root", X),
                            .edges = edges,
                            .chain_seed = chain_seed,
                        });
  return {token, parent, depth, ancestors, node_score};
}

template <auto Launch>
std::tuple<Tensor, Tensor, Tensor> sample(const Tensor logits, const Tensor position,
                                          const Tensor seed, const Tensor temperature,
                                          const Tensor top_k, const Tensor top_p,
                                          const Tensor min_p, const std::optional<Tensor> raw) {
  check_dim("logits", logits, 3);
  check_float("logits", logits);
  const int64_t B = logits.size(0), N = logits.size(1), W = logits.size(2);
  check_vocabulary(W);
  extent("logits", B * N);
  check("position", position, {B, N}, ScalarType::Int, logits);
  check("seed", seed, {B}, ScalarType::Long, logits);
  check("temperature", temperature, {B}, ScalarType::Float, logits);
  check("top_k", top_k, {B}, ScalarType::Int, logits);
  check("top_p", top_p, {B}, ScalarType::Float, logits);
  check("min_p", min_p, {B}, ScalarType::Float, logits);
  if (raw) check("raw", *raw, {B, N, W}, ScalarType::Float, logits);
  auto token = empty(logits, {B, N}, ScalarType::Long);
  auto logprob = empty(logits, {B, N}, ScalarType::Float);
  auto finite = empty(logits, {B, N}, ScalarType::Bool);
  if (B * N == 0) return {token, logprob, finite};
  run_on<Launch>(logits, SampleParams{
                             .logits = data<float>(logits),
                             .raw = data<float>(raw ? *raw : logits),
                             .position = data<int32_t>(position),
                             .seed = data<int64_t>(seed),
                             .temperature = data<float>(temperature),
                             .top_k = data<int32_t>(top_k),
                             .top_p = data<float>(top_p),
                             .min_p = data<float>(min_p),
                             .token = mutable_data<int64_t>(token),
                             .logprob = mutable_data<float>(logprob),
                             .finite = mutable_data<bool>(finite),
                             .B = extent("logits", B),
                             .N = extent("logits", N),
                             .W = extent("logits", W),
                         });
  return {token, logprob, finite};
}

template <auto Launch>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tree_accept(const Tensor token,
                                                               const Tensor parent,
                                                               const Tensor target,
                                                               const Tensor finite,
                                                               const Tensor logprob) {
  check_dim("token", token, 2);
  const int64_t B = token.size(0), N = token.size(1);
  require(N >= 1 && N <= kMaxNodes, "token has ", N, " nodes, wants 1 to ", kMaxNodes);
  check("token", token, {B, N}, ScalarType::Long, token);
  check("parent", parent, {B, N}, ScalarType::Int, token);
  check("target", target, {B, N}, ScalarType::Long, token);
  check("finite", finite, {B, N}, ScalarType::Bool, token);
  check("logprob", logprob, {B, N}, ScalarType::Float, token);
  const int64_t J = std::min<int64_t>(N, kMaxDepth + 1);
  auto path = empty(token, {B, J}, ScalarType::Int);
  auto length = empty(token, {B}, ScalarType::Int);
  auto tokens = empty(token, {B, J}, ScalarType::Long);
  auto logprobs = empty(token, {B, J}, ScalarType::Float);
  auto failed = empty(token, {B}, ScalarType::Bool);
  if (B == 0) return {path, length, tokens, logprobs, failed};
  run_on<Launch>(token, TreeAcceptParams{
                            .token = data<int64_t>(token),
                            .parent = data<int32_t>(parent),
                            .target = data<int64_t>(target),
                            .finite = data<bool>(finite),
                            .logprob = data<float>(logprob),
                            .path = mutable_data<int32_t>(path),
                            .length = mutable_data<int32_t>(length),
                            .tokens = mutable_data<int64_t>(tokens),
                            .logprobs = mutable_data<float>(logprobs),
                            .failed = mutable_data<bool>(failed),
                            .B = extent("token", B),
                            .N = static_cast<int>(N),
                            .J = static_cast<int>(J),
                        });
  return {path, length, tokens, logprobs, failed};
}

template <auto Launch>
std::tuple<Tensor, Tensor> tree_choose(const Tensor parent, const Tensor depth, const Tensor score,
                                       const Tensor factor, const Tensor sizes,
                                       const Tensor seconds) {
  check_dim("parent", parent, 2);
  const int64_t B = parent.size(0), N = parent.size(1);
  require(N >= 1 && N <= kMaxNodes, "parent has ", N, " nodes, wants 1 to ", kMaxNodes);
  check("parent", parent, {B, N}, ScalarType::Int, parent);
  check("depth", depth, {B, N}, ScalarType::Int, parent);
  check("score", score, {B, N}, ScalarType::Float, parent);
  check("factor", factor, {kMaxDepth, kKinds}, ScalarType::Float, parent);
  check_dim("sizes", sizes, 1);
  const int64_t S = sizes.size(0);
  require(S >= 1 && S <= kMaxNodes, "sizes has ", S, " of them, wants 1 to ", kMaxNodes);
  check("sizes", sizes, {S}, ScalarType::Int, parent);
  check("seconds", seconds, {S}, ScalarType::Float, parent);
  auto choice = empty(parent, {1}, ScalarType::Int);
  auto expected = empty(parent, {N}, ScalarType::Float);
  run_on<Launch>(parent, TreeChooseParams{
                             .parent = data<int32_t>(parent),
                             .depth = data<int32_t>(depth),
                             .score = data<float>(score),
                             .factor = data<float>(factor),
                             .sizes = data<int32_t>(sizes),
                             .seconds = data<float>(seconds),
                             .choice = mutable_data<int32_t>(choice),
                             .expected = mutable_data<float>(expected),
                             .B = extent("parent", B),
                             .N = static_cast<int>(N),
                             .S = static_cast<int>(S),
                         });
  return {choice, expected};
}

template <auto Launch>
void clock(const Tensor times, int64_t slot) {
  check_dim("times", times, 1);
  check("times", times, {times.size(0)}, ScalarType::Long, times);
  require(slot >= 0 && slot < times.size(0), "slot is ", slot, ", wants 0 to ", times.size(0) - 1);
  run_on<Launch>(times, ClockParams{mutable_data<int64_t>(times), static_cast<int>(slot)});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kdtree, CPU, m) {
  m.impl("draft_logits", TORCH_BOX(&draft_logits<cpu::draft_logits>));
  m.impl("top_logprobs", TORCH_BOX(&top_logprobs<cpu::top_logprobs>));
  m.impl("tree_build", TORCH_BOX(&tree_build<cpu::tree_build>));
  m.impl("sample", TORCH_BOX(&sample<cpu::sample>));
  m.impl("tree_accept", TORCH_BOX(&tree_accept<cpu::tree_accept>));
  m.impl("tree_choose", TORCH_BOX(&tree_choose<cpu::tree_choose>));
  m.impl("clock", TORCH_BOX(&clock<cpu::clock>));
}

#ifdef KDTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("draft_logits", TORCH_BOX(&draft_logits<cuda::draft_logits>));
  m.impl("top_logprobs", TORCH_BOX(&top_logprobs<cuda::top_logprobs>));
  m.impl("tree_build", TORCH_BOX(&tree_build<cuda::tree_build>));
  m.impl("sample", TORCH_BOX(&sample<cuda::sample>));
  m.impl("tree_accept", TORCH_BOX(&tree_accept<cuda::tree_accept>));
  m.impl("tree_choose", TORCH_BOX(&tree_choose<cuda::tree_choose>));
  m.impl("clock", TORCH_BOX(&clock<cuda::clock>));
}
#endif

}  // namespace kdtree
