"""The time of every op beside its floor and, where torch has the same, eager torch.

On CUDA at the shapes of Kimi-K2.6, on a CPU at the demo model's. Weights and caches turn through
copies that exceed the second-level cache, so that they come from memory as they do in a model;
activations are warm, as they are there. Every op is checked once before its time is taken.
"""

from collections.abc import Callable, Iterator

import harness
import torch
from cases import Bench, Case
from cases_attention import (
    kv_compact,
    mla_append,
    mla_attention,
    mla_prefill,
    mla_query,
    mla_query_append,
)
from cases_dense import add_rms_norm, linear, rms_norm, swiglu
from cases_draft import block_append, block_attention, block_conv, block_embed, edge_scores
from cases_experts import int4_linear, int4_pack, moe_experts, moe_route
from cases_round import ngram_match, state_commit, tree_place
from cases_tree import (
    clock,
    draft_logits,
    sample,
    top_logprobs,
    tree_accept,
    tree_build,
    tree_choose,
)

BENCHES = [
    rms_norm, add_rms_norm, linear, swiglu, int4_pack, int4_linear, moe_route, moe_experts,
    mla_query, mla_append, mla_query_append, mla_attention, mla_prefill, kv_compact, block_embed,
    block_attention, block_append, block_conv, draft_logits, top_logprobs, edge_scores, tree_build,
    sample, tree_accept, tree_choose, clock, tree_place, ngram_match, state_commit,
]  # fmt: skip


def rows(
    bench: Callable[[Bench], Iterator[Case]], b: Bench, peaks: harness.Peaks
) -> Iterator[dict]:
    """The measured rows of one op."""
    for case in bench(b):
        name, baseline = case.baseline or (None, None)
        where = torch.device("cpu") if case.on_host else b.device
        yield {
            "op": bench.__name__,
            "shape": case.shape,
            "dtype": str(b.dtype).removeprefix("torch."),
            "weights": case.weights,
            "us": harness.time(case.run, b.device),
            "floor_us": harness.floor(case.bytes, case.flops, peaks),
            "baseline": name,
            "baseline_us": harness.time(baseline, where) if baseline else None,
        }


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=[f.__name__ for f in BENCHES], metavar="OP")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    b, peaks = Bench(arguments.device), harness.peaks(arguments.device)
    results = []
    for bench in BENCHES:
        if bench.__name__ in arguments.only:
            results += rows(bench, b, peaks)
            if b.device.type == "cuda":
                torch.cuda.empty_cache()  # the next op's operands may want it
    facts = harness.header(arguments.device, peaks, arguments.commit)
    harness.write(f"ops_{arguments.device.type}", results, facts, arguments.out)


if __name__ == "__main__":
    main()
