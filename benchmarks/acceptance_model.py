"""What a tree costs the model, and what INT4 costs its text: rows for acceptance.py.

Kind "experts": distinct routed experts that a tree of N nodes touches in a layer (mean over layers
and rounds), beside uniform independent routing. Kind "int4": how often the greedy token changes
where INT4 replaces bfloat16, by the margin of the best token over the next, in nats. The demo
model's routed experts exist as INT4 alone, so its shared experts and dense layer, which are
bfloat16, stand in for them: they are rounded to INT4, group 32, by squared error or not at all.
"""

from collections.abc import Iterator

import eager
import torch
from torch import Tensor

from kdtree import Engine, SamplingParams, ops
from kdtree.layers.moe import Mlp
from kdtree.tree import TokenTree
from kdtree.weights.formats import quantize_int4

NODES = (2, 4, 8, 16, 32, 64)
MARGINS = (0.0, 0.1, 0.3, 1.0, 3.0, float("inf"))  # nats
FEW, TOKENS = 16, 64  # prompts a category, tokens of each


def rows(arguments, prompts: dict[str, list[str]]) -> Iterator[dict]:
    for category, texts in prompts.items():
        for nodes in NODES:
            yield experts(arguments, category, texts[:FEW], nodes)
    yield from int4(arguments, prompts)


def experts(arguments, category: str, texts: list[str], nodes: int) -> dict:
    engine = make(arguments, "dflash", nodes - 1)
    c, touched, route = engine.config.moe, [], ops.moe_route

    def recorded(logits: Tensor, *rest, **options):
        ids, weights = route(logits, *rest, **options)
        if len(ids) == nodes:  # a round; a chunk of a prompt of this length is as good
            touched.append(ids[ids >= 0].unique().numel())
        return ids, weights

    ops.moe_route = recorded
    try:
        engine.generate(texts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    finally:
        ops.moe_route = route
    return {
        "kind": "experts",
        "category": category,
        "N": nodes,
        "distinct": sum(touched) / len(touched),
        "uniform": c.experts * (1 - (1 - c.experts_per_token / c.experts) ** nodes),
        "of": c.experts,
    }


def int4(arguments, prompts: dict[str, list[str]]) -> Iterator[dict]:
    engine = make(arguments, "none", 0)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    texts = [text for each in prompts.values() for text in each[:FEW]]
    ids = [r.prompt_token_ids + r.token_ids for r in engine.generate(texts, params)]
    before = torch.cat([logits(engine, each) for each in ids])
    drafted = acceptance(engine=make(arguments, "dflash", 7), texts=texts, params=params)
    changed = make(arguments, "dflash", 7)
    for module in changed.model.modules():
        if isinstance(module, Mlp):
            for product in (module.gate_up_proj, module.down_proj):
                product.weight.copy_(rounded(product.weight))
    after = torch.cat([logits(changed, each) for each in ids])
    flipped = before.argmax(1) != after.argmax(1)
    top = before.log_softmax(1).topk(2).values
    margin = top[:, 0] - top[:, 1]
    for low, high in zip(MARGINS, MARGINS[1:], strict=False):
        inside = (margin >= low) & (margin < high)
        count = int(inside.sum())
        yield {
            "kind": "int4",
            "margin": low,
            "positions": count,
            "flips": int((flipped & inside).sum()),
        }
    yield {
        "kind": "int4_acceptance",
        "bfloat16": drafted,
        "int4": acceptance(engine=changed, texts=texts, params=params),
    }


def rounded(weight: Tensor) -> Tensor:
    codes, scale = quantize_int4(weight)
    return eager.int4_weights(codes, scale.float()).to(weight.dtype)


def acceptance(engine: Engine, texts: list[str], params: SamplingParams) -> float:
    metrics = [result.metrics for result in engine.generate(texts, params)]
    return sum(m.tokens for m in metrics) / sum(m.rounds for m in metrics)


@torch.no_grad()
def logits(engine: Engine, ids: list[int]) -> Tensor:
    """Of every position but the last, [n - 1, W] float32."""
    cache = engine.cache.sequence(0)
    cache.context.zero_()
    token = torch.tensor([ids[:-1]], device=engine.device)
    hidden, _ = engine.model(cache.place(TokenTree.chain(token)), cache)
    return engine.model.logits(hidden)[0]


def make(arguments, drafter, budget: int) -> Engine:
    return Engine(
        arguments.model,
        drafter=drafter,
        budget=budget,
        device=str(arguments.device),
        max_seq_len=512,
    )
