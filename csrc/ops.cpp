// The library's schemas, in one table, and the threads that its CPU kernels borrow from torch. The
// ops stand by area in ops_dense.cpp, ops_experts.cpp, ops_latents.cpp, ops_attention.cpp,
// ops_draft.cpp, ops_tree.cpp and ops_round.cpp.
#include "ops.h"

#include "cpu/common.h"

namespace kdtree::cpu {

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& f) {
  torch::stable::parallel_for(0, count, grain, f);
}

}  // namespace kdtree::cpu

STABLE_TORCH_LIBRARY(kdtree, m) {
  m.def("rms_norm(Tensor x, Tensor w, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor w, float eps) -> (Tensor, Tensor)");
  m.def("linear(Tensor x, Tensor w, ScalarType? out_dtype) -> Tensor");
  m.def("swiglu(Tensor x) -> Tensor");

  m.def("int4_pack(Tensor codes, Tensor scale) -> (Tensor, Tensor)");
  m.def("int4_linear(Tensor x, Tensor packed, Tensor scale) -> Tensor");
  m.def(
      "moe_route(Tensor logits, Tensor? bias, Tensor? position, int experts_per_token, int groups,"
      " int kept_groups, str scoring, str group_score, bool normalize, float scale)"
      " -> (Tensor, Tensor)");
  m.def(
      "moe_experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down,"
      " Tensor? gate_up_scale, Tensor? down_scale, Tensor? shared) -> Tensor");

  m.def(
      "mla_query(Tensor q, Tensor w_uk, Tensor rope, Tensor position, bool interleaved) -> Tensor");
  m.def(
      "mla_append(Tensor(a!) cache, Tensor kv, Tensor w, float eps, Tensor rope, Tensor position,"
      " Tensor slot, bool interleaved) -> ()");
  m.def(
      "mla_query_append(Tensor(a!) cache, Tensor q, Tensor w_uk, Tensor kv, Tensor w, float eps,"
      " Tensor rope, Tensor position, Tensor slot, bool interleaved) -> Tensor");
  m.def(
      "mla_attention(Tensor q, Tensor cache, Tensor block_table, Tensor context, Tensor? ancestors,"
      " int latent, float scale) -> Tensor");
  m.def(
      "mla_prefill(Tensor q, Tensor k, Tensor v, Tensor k_rope, Tensor rope, bool interleaved,"
      " float scale) -> Tensor");
  m.def(
      "kv_compact(Tensor(a!) cache, Tensor block_table, Tensor context, Tensor path, Tensor length)"
      " -> ()");

  m.def(
      "block_embed(Tensor token, Tensor length, Tensor table, Tensor mask, int slots, float scale)"
      " -> Tensor");
  m.def(
      "block_attention(Tensor qkv, Tensor q_norm, Tensor k_norm, float eps, Tensor rope,"
      " Tensor cache, Tensor length, int window, bool causal, float scale) -> Tensor");
  m.def(
      "block_append(Tensor(a!) cache, Tensor kv, Tensor k_norm, float eps, Tensor rope,"
      " Tensor start, Tensor? path, Tensor? kept, int[] rows, int first) -> ()");
  m.def("block_conv(Tensor x, Tensor dynamic, Tensor base, int slots) -> Tensor");
  m.def(
      "edge_scores(Tensor score, Tensor candidate, Tensor token, Tensor length, Tensor temperature,"
      " Tensor a, Tensor c, Tensor? more, Tensor? weight, Tensor? direction, Tensor? before,"
      " Tensor? after) -> Tensor");

  m.def(
      "draft_logits(Tensor logits, Tensor position, Tensor seed, Tensor temperature, Tensor a,"
      " Tensor b, Tensor c) -> Tensor");
  m.def("top_logprobs(Tensor logits, int k) -> (Tensor, Tensor)");
  m.def(
      "tree_build(Tensor score, Tensor candidate, Tensor root, int budget, bool chain_seed,"
      " Tensor? active, Tensor? length) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "sample(Tensor logits, Tensor position, Tensor seed, Tensor temperature, Tensor top_k,"
      " Tensor top_p, Tensor min_p, Tensor? raw) -> (Tensor, Tensor, Tensor)");
  m.def(
      "tree_accept(Tensor token, Tensor parent, Tensor target, Tensor finite, Tensor logprob)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "tree_choose(Tensor parent, Tensor depth, Tensor score, Tensor factor, Tensor sizes,"
      " Tensor seconds) -> (Tensor, Tensor)");

  m.def(
      "tree_place(Tensor context, Tensor block_table, Tensor depth, Tensor? ancestors)"
      " -> (Tensor, Tensor)");
  m.def(
      "ngram_match(Tensor token, Tensor length, int longest, int matches, int depth, float first,"
      " float next, float rank) -> (Tensor, Tensor)");
  m.def(
      "state_commit(Tensor(a!) token, Tensor(b!) length, Tensor(c!) active, Tensor limit,"
      " Tensor stop, Tensor emitted, Tensor count, Tensor logprob, Tensor failed,"
      " Tensor? depth) -> Tensor");

  m.def("clock(Tensor(a!) times, int slot) -> ()");
}
