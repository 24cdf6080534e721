"""What rounds of Kimi-K2.6 cost on 8 H200 by the floors of `kdtree plan`; nothing is measured."""

from pathlib import Path

from kdtree import Costs
from kdtree.plan import Machine, formulas, make_plan, read

CONFIG = Path(__file__).parents[1] / "tests" / "data" / "kimi-k2.6" / "config.json"
NAME = "Kimi-K2.6 on 8 H200, floors"
# The published drafter, bfloat16, 5 layers; it uses the target's head, [163840, 7168].
DRAFTER_BYTES, HEAD_BYTES, DRAFTER_SUMS, BLOCK = 6.96e9, 163840 * 7168 * 2, 13, 8
CONTEXT, GPUS = 4096, 8


def costs(sizes: list[int]) -> Costs:
    """Seconds of a round at a context of 4096, by N, and of a draft."""
    source, gpus = read(CONFIG), Machine(GPUS, 141e9, 6e9)
    made = make_plan(source.config, source.tensors, gpus, context=CONTEXT, nodes=sizes)
    read_s = (DRAFTER_BYTES + HEAD_BYTES) / GPUS / formulas.BANDWIDTH
    sums_s = DRAFTER_SUMS * formulas.all_reduce_seconds(source.config, BLOCK)
    return Costs({step.nodes: step.total / 1e3 for step in made.steps}, read_s + sums_s)
