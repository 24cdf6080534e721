"""The library's operators, as typed Python functions, one module an area.

Each function calls one op of `torch.ops.kdtree`, which `_C.so` registers for CPU and, when built
with CUDA, for CUDA. Under each stands its fake: the outputs' shapes and dtypes without data, which
torch.compile and FakeTensor need. Nothing else in the package touches `torch.ops.kdtree`. All raise
RuntimeError, with what is wrong and what is wanted, on a wrong shape, dtype, device or value. Shape
letters: csrc/kdtree.h.
"""

from kdtree.ops.attention import (
    kv_compact,
    mla_append,
    mla_attention,
    mla_prefill,
    mla_query,
    mla_query_append,
)
from kdtree.ops.dense import add_rms_norm, linear, rms_norm, swiglu
from kdtree.ops.draft import block_append, block_attention, block_conv, block_embed, edge_scores
from kdtree.ops.experts import int4_linear, int4_pack, moe_experts, moe_route
from kdtree.ops.round import ngram_match, state_commit, tree_place
from kdtree.ops.tree import (
    clock,
    draft_logits,
    sample,
    top_logprobs,
    tree_accept,
    tree_build,
    tree_choose,
)

__all__ = [
    "add_rms_norm",
    "block_append",
    "block_attention",
    "block_conv",
    "block_embed",
    "clock",
    "draft_logits",
    "edge_scores",
    "int4_linear",
    "int4_pack",
    "kv_compact",
    "linear",
    "mla_append",
    "mla_attention",
    "mla_prefill",
    "mla_query",
    "mla_query_append",
    "moe_experts",
    "moe_route",
    "ngram_match",
    "rms_norm",
    "sample",
    "state_commit",
    "swiglu",
    "top_logprobs",
    "tree_accept",
    "tree_build",
    "tree_choose",
    "tree_place",
]
