// The torch face of what a round does beside its tree and the layers: per op, one function that
// checks its tensors, allocates its outputs and fills a Params; then the registrations.
#include "ops.h"

namespace kdtree {
namespace {

constexpr int64_t kMaxMatch = 64;  // tokens that ngram_match compares at most

void check_between(const char* name, int64_t value, int64_t least, int64_t most) {
  require(value >= least && value <= most, name, " is ", value, ", wants ", least, " to ", most);
}

template <auto Launch>
std::tuple<Tensor, Tensor> tree_place(const Tensor context, const Tensor block_table,
                                      const Tensor depth, const std::optional<Tensor> ancestors) {
  check_dim("depth", depth, 2);
  check_dim("block_table", block_table, 2);
  const int64_t B = depth.size(0), N = depth.size(1), pages = block_table.size(1);
  check("depth", depth, {B, N}, ScalarType::Int, context);
  check("context", context, {B}, ScalarType::Int, context);
  check("block_table", block_table, {B, pages}, ScalarType::Int, context);
  require(pages > 0, "block_table has no pages");
  if (ancestors) check("ancestors", *ancestors, {B, N}, ScalarType::Long, context);
  extent("depth", B * N);
  auto position = empty(depth, {B, N}, ScalarType::Int);
  auto slot = empty(depth, {B, N}, ScalarType::Int);
  if (B * N == 0) return {position, slot};
  run_on<Launch>(context, TreePlaceParams{
                              .context = data<int32_t>(context),
                              .block_table = data<int32_t>(block_table),
                              .depth = data<int32_t>(depth),
                              .ancestors = data<int64_t>(ancestors),
                              .position = mutable_data<int32_t>(position),
                              .slot = mutable_data<int32_t>(slot),
                              .B = static_cast<int>(B),
                              .N = static_cast<int>(N),
                              .max_pages = extent("block_table", pages),
                          });
  return {position, slot};
}

template <auto Launch>
std::tuple<Tensor, Tensor> ngram_match(const Tensor token, const Tensor length, int64_t longest,
                                       int64_t matches, int64_t depth, double first, double next,
                                       double rank) {
  check_dim("token", token, 2);
  const int64_t B = token.size(0), X = token.size(1), J = depth, M = matches;
  check("token", token, {B, X}, ScalarType::Long, token);
  check("length", length, {B}, ScalarType::Int, token);
  require(X > 0, "token has room for none");
  check_between("longest", longest, 1, kMaxMatch);
  check_between("matches", matches, 1, kMaxNodes);
  check_between("depth", depth, 1, kMaxDepth);
  auto candidate = empty(token, {B, J, M}, ScalarType::Long);
  auto score = empty(token, {B, J, M, M}, ScalarType::Float);
  if (B == 0) return {candidate, score};
  run_on<Launch>(token, NgramMatchParams{
                            .token = data<int64_t>(token),
                            .length = data<int32_t>(length),
                            .candidate = mutable_data<int64_t>(candidate),
                            .score = mutable_data<float>(score),
                            .B = extent("token", B),
                            .X = extent("token", X),
                            .J = static_cast<int>(J),
                            .M = static_cast<int>(M),
                            .longest = static_cast<int>(longest),
                            .first = static_cast<float>(first),
                            .next = static_cast<float>(next),
                            .rank = static_cast<float>(rank),
                        });
  return {candidate, score};
}

template <auto Launch>
Tensor state_commit(Tensor token, Tensor length, Tensor active, const Tensor limit,
                    const Tensor stop, const Tensor emitted, const Tensor count,
                    const Tensor logprob, const Tensor failed,
                    const std::optional<Tensor> depth) {
  check_dim("token", token, 2);
  check_dim("stop", stop, 2);
  check_dim("emitted", emitted, 2);
  const int64_t B = token.size(0), X = token.size(1), S = stop.size(1), J = emitted.size(1);
  check("token", token, {B, X}, ScalarType::Long, token);
  check("length", length, {B}, ScalarType::Int, token);
  check("active", active, {B}, ScalarType::Bool, token);
  check("limit", limit, {B}, ScalarType::Int, token);
  check("stop", stop, {B, S}, ScalarType::Long, token);
  check_between("the number of stop tokens", S, 1, kMaxStops);
  check("emitted", emitted, {B, J}, ScalarType::Long, token);
  check("count", count, {B}, ScalarType::Int, token);
  check("logprob", logprob, {B, J}, ScalarType::Float, token);
  check("failed", failed, {B}, ScalarType::Bool, token);
  if (depth) check_dim("depth", *depth, 2);
  const int64_t N = depth ? depth->size(1) : 0;
  if (depth) check("depth", *depth, {B, N}, ScalarType::Int, token);
  require(!depth || N > 0, "depth has no nodes");
  auto record = empty(token, {B, (depth ? 4 : 2) + 2 * J}, ScalarType::Long);
  if (B == 0) return record;
  run_on<Launch>(token, StateCommitParams{
                            .token = mutable_data<int64_t>(token),
                            .length = mutable_data<int32_t>(length),
                            .active = mutable_data<bool>(active),
                            .limit = data<int32_t>(limit),
                            .stop = data<int64_t>(stop),
                            .emitted = data<int64_t>(emitted),
                            .count = data<int32_t>(count),
                            .logprob = data<float>(logprob),
                            .failed = data<bool>(failed),
                            .depth = data<int32_t>(depth),
                            .record = mutable_data<int64_t>(record),
                            .B = extent("token", B),
                            .X = extent("token", X),
                            .S = static_cast<int>(S),
                            .J = extent("emitted", J),
                            .N = extent("depth", N),
                        });
  return record;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kdtree, CPU, m) {
  m.impl("tree_place", TORCH_BOX(&tree_place<cpu::tree_place>));
  m.impl("ngram_match", TORCH_BOX(&ngram_match<cpu::ngram_match>));
  m.impl("state_commit", TORCH_BOX(&state_commit<cpu::state_commit>));
}

#ifdef KDTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("tree_place", TORCH_BOX(&tree_place<cuda::tree_place>));
  m.impl("ngram_match", TORCH_BOX(&ngram_match<cuda::ngram_match>));
  m.impl("state_commit", TORCH_BOX(&state_commit<cuda::state_commit>));
}
#endif

}  // namespace kdtree
