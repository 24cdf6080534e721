"""A slice of a model: some of its layers and the head, at full size, with random weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kdtree.cache import KvCache, require_room
from kdtree.checks import shown, whole
from kdtree.config import ModelConfig
from kdtree.errors import CapacityError
from kdtree.layers import Moe
from kdtree.models import Deepseek
from kdtree.tree import MAX_DEPTH, TokenTree
from kdtree.weights.random import RandomWeights

SETS = 4  # of a context and a tree, in turns: each reads experts and latents of its own
WIDEST = 16  # children of a random tree's node, at most
SEED = 1
WEIGHTS = {"random-int4": "int4", "random-bf16": None}  # of the routed experts


@dataclass(frozen=True)
class Slice:
    """cache: SETS sequences with `context` random latents each"""

    model: Deepseek
    cache: KvCache
    context: int

    def trees(self, nodes: int) -> list[TokenTree]:
        """A random tree of N nodes for each sequence, every node with a token of its own."""
        device, vocab = self.cache.data.device, self.model.config.vocab
        random = torch.Generator(device).manual_seed(SEED)
        score = torch.empty(SETS, MAX_DEPTH, WIDEST, device=device).normal_(generator=random)
        score = score.log_softmax(2).sort(2, descending=True).values
        none = torch.zeros_like(score, dtype=torch.int64)
        tree = TokenTree.build(score, none, none.new_zeros(SETS), nodes - 1, False)
        token = torch.randint(vocab, tree.token.shape, device=device, generator=random)
        parts = token, tree.parent, tree.depth, tree.ancestors
        return [TokenTree(*(x[b : b + 1].contiguous() for x in parts)) for b in range(SETS)]

    def forward(
        self, tree: TokenTree, b: int, *, layers: int | None = None, head: bool = True
    ) -> Tensor:
        """Of sequence b, as a round runs it: placed, through the layers, and the head.

        layers: the first of them, all by default; head: logits are wanted
        """
        cache = self.cache.sequence(b)
        with self.first(len(self.model.layers) if layers is None else layers):
            hidden, _ = self.model(cache.place(tree), cache)
        return self.model.logits(hidden) if head else hidden

    @contextmanager
    def first(self, layers: int) -> Iterator[None]:
        """Within it the model has so many layers and no more."""
        every = self.model.layers
        self.model.layers = every[:layers]
        try:
            yield
        finally:
            self.model.layers = every

    def experts(self, trees: list[TokenTree]) -> list[float]:
        """Distinct experts that each MoE layer reads for a tree, the mean over the trees."""
        chosen, layers = [], [x.mlp for x in self.model.layers if isinstance(x.mlp, Moe)]
        hooks = [
            mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[0]))
            for mlp in layers
        ]
        for b, tree in enumerate(trees):
            self.forward(tree, b, head=False)
        for hook in hooks:
            hook.remove()
        assert len(chosen) == len(trees) * len(layers)
        counts = [len(ids[ids >= 0].unique()) for ids in chosen]
        return [sum(counts[i :: len(layers)]) / len(trees) for i in range(len(layers))]


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    """The config of a slice: one dense layer, where the model has any, then layers with experts."""
    whole("layers", layers, 1, config.layers)
    moe = config.moe
    if moe is None:
        return replace(config, layers=layers)
    dense = min(moe.first_layer, 1)
    most = dense + config.layers - moe.first_layer
    if layers > most:
        raise ValueError(
            f"layers is {layers}, wants at most {most}: {dense} dense and "
            f"{config.layers - moe.first_layer} with experts"
        )
    return replace(
        config, layers=layers, moe=replace(moe, first_layer=dense) if layers > dense else None
    )


def build(
    config: ModelConfig, weights: str, context: int, device: torch.device, dtype: torch.dtype
) -> Slice:
    """Makes the slice of a config that `cut` gave.

    Raises CapacityError, before anything is allocated, where the device has not the memory, and
    where the model has not the context.
    """
    whole("context", context, 1)
    if context + MAX_DEPTH + 1 > config.max_positions:
        raise CapacityError(
            f"context is {shown(context)} and a tree {MAX_DEPTH + 1} deep, the model has "
            f"{config.max_positions} positions"
        )
    positions = context + MAX_DEPTH + 1

    def model(where: torch.device | str) -> Deepseek:
        return Deepseek(config, RandomWeights(where, dtype, WEIGHTS[weights], SEED), positions)

    width = config.mla.kv_lora_rank + config.mla.rope
    sizes = [x.nbytes for x in model("meta").parameters()]
    latents = SETS * config.layers * context * width * dtype.itemsize
    dense = max(config.vocab, 2 * config.dense_width) * config.hidden * dtype.itemsize
    # Matrices that are one product are made apart and then joined.
    require_room(f"a slice of {config.layers} layers", sum(sizes) + latents + dense, device)
    made = model(device)
    cache = KvCache(config.layers, width, SETS, context + 1, device=device, dtype=dtype)
    cache.data.normal_(generator=torch.Generator(device).manual_seed(SEED))
    cache.context.fill_(context)
    return Slice(made, cache, context)
