// The launchers: every op, on every backend, as `void op(const OpParams&, Stream)`.
#pragma once

#include "attention.h"
#include "draft.h"
#include "kdtree.h"
#include "round.h"

namespace kdtree {

namespace cpu {
void rms_norm(const RmsNormParams&, Stream);
void add_rms_norm(const AddRmsNormParams&, Stream);
void linear(const LinearParams&, Stream);
void swiglu(const SwigluParams&, Stream);
void int4_pack(const Int4PackParams&, Stream);
void int4_linear(const Int4LinearParams&, Stream);
void moe_route(const MoeRouteParams&, Stream);
void moe_experts(const MoeExpertsParams&, Stream);
void mla_query(const MlaQueryParams&, Stream);
void mla_append(const MlaAppendParams&, Stream);
void mla_query_append(const MlaQueryAppendParams&, Stream);
void mla_attention(const MlaAttentionParams&, Stream);
void mla_prefill(const MlaPrefillParams&, Stream);
void block_embed(const BlockEmbedParams&, Stream);
void block_attention(const BlockAttentionParams&, Stream);
void block_append(const BlockAppendParams&, Stream);
void block_conv(const BlockConvParams&, Stream);
void kv_compact(const KvCompactParams&, Stream);
void draft_logits(const DraftLogitsParams&, Stream);
void edge_scores(const EdgeScoresParams&, Stream);
void top_logprobs(const TopLogprobsParams&, Stream);
void tree_build(const TreeBuildParams&, Stream);
void sample(const SampleParams&, Stream);
void tree_accept(const TreeAcceptParams&, Stream);
void tree_choose(const TreeChooseParams&, Stream);
void clock(const ClockParams&, Stream);
void tree_place(const TreePlaceParams&, Stream);
void ngram_match(const NgramMatchParams&, Stream);
void state_commit(const StateCommitParams&, Stream);
}  // namespace cpu

namespace cuda {
void rms_norm(const RmsNormParams&, Stream);
void add_rms_norm(const AddRmsNormParams&, Stream);
void linear(const LinearParams&, Stream);
void swiglu(const SwigluParams&, Stream);
void int4_pack(const Int4PackParams&, Stream);
void int4_linear(const Int4LinearParams&, Stream);
void moe_route(const MoeRouteParams&, Stream);
void moe_experts(const MoeExpertsParams&, Stream);
void mla_query(const MlaQueryParams&, Stream);
void mla_append(const MlaAppendParams&, Stream);
void mla_query_append(const MlaQueryAppendParams&, Stream);
void mla_attention(const MlaAttentionParams&, Stream);
void mla_prefill(const MlaPrefillParams&, Stream);
void block_embed(const BlockEmbedParams&, Stream);
void block_attention(const BlockAttentionParams&, Stream);
void block_append(const BlockAppendParams&, Stream);
void block_conv(const BlockConvParams&, Stream);
void kv_compact(const KvCompactParams&, Stream);
void draft_logits(const DraftLogitsParams&, Stream);
void edge_scores(const EdgeScoresParams&, Stream);
void top_logprobs(const TopLogprobsParams&, Stream);
void tree_build(const TreeBuildParams&, Stream);
void sample(const SampleParams&, Stream);
void tree_accept(const TreeAcceptParams&, Stream);
void tree_choose(const TreeChooseParams&, Stream);
void clock(const ClockParams&, Stream);
void tree_place(const TreePlaceParams&, Stream);
void ngram_match(const NgramMatchParams&, Stream);
void state_commit(const StateCommitParams&, Stream);
}  // namespace cuda

}  // namespace kdtree
