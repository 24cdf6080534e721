"""The drafter: its config, what it keeps between rounds, and the tree that it proposes."""

import logging
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kdtree.checks import whole
from kdtree.drafters.base import Setup, grow, nodes_of
from kdtree.drafters.dflash.cache import ContextCache
from kdtree.drafters.dflash.config import Architecture, read
from kdtree.drafters.dflash.model import Dflash
from kdtree.drafters.edges import Bigram, Selector
from kdtree.drafters.none import NoDraft
from kdtree.drafters.scores import Scorer, ScoresConfig
from kdtree.errors import ConfigError
from kdtree.models import Deepseek
from kdtree.state import State
from kdtree.tree import MAX_DEPTH, MAX_NODES, Path, TokenTree
from kdtree.weights import Checkpoint, load

BESIDE = "drafter"  # in a model's directory, the directory of its drafter
CANDIDATES = 16  # of a depth, where the checkpoint does not say
DIM = 0.1  # a mask token whose embedding is so much shorter than usual says nothing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DflashConfig:
    """Block diffusion drafting (DFlash): all tokens of a block in one forward of a small model.

    model: directory of a drafter as published; None for `drafter` in the model's own directory
    window: positions that full-attention layers see at most, None for all
    yarn_amplitude: "config" for the one that the checkpoint's mscale and mscale_all_dim give,
        "legacy" for 0.1 ln(factor) + 1 whatever they are
    budget: nodes of the largest tree that the engine may choose where it names none
    scores: instead of the checkpoint's kdtree_scores of these names, see kdtree.drafters.scores
    bigram: a safetensors file with a bigram table, which scores["bigram"] weighs
    """

    model: str | pathlib.Path | None = None
    window: int | None = None
    yarn_amplitude: str = "config"
    budget: int = MAX_NODES - 1
    scores: dict[str, Sequence[float]] | None = None
    bigram: str | pathlib.Path | None = None

    def create(self, setup: Setup) -> "DflashDrafter | NoDraft":
        """Trees of the root alone take no model.

        Raises ConfigError, CheckpointError, CapacityError, ValueError and TypeError.
        """
        whole("budget", self.budget, 0, MAX_NODES - 1)
        if self.window is not None:
            whole("window", self.window, 2)
        if self.yarn_amplitude not in ("config", "legacy"):
            raise ValueError(
                f"yarn_amplitude is {self.yarn_amplitude!r}, wants 'config' or 'legacy'"
            )
        made = DflashDrafter(self, setup)
        return NoDraft() if made.nodes == 1 else made

    def directory(self, model: pathlib.Path) -> pathlib.Path:
        """The drafter's directory. model: the target's. Raises ConfigError where there is none."""
        if not isinstance(self.model, str | pathlib.Path | None):
            raise TypeError(f"model is {self.model!r}, wants a drafter's directory")
        path = model / BESIDE if self.model is None else pathlib.Path(self.model)
        if not path.is_dir():
            raise ConfigError(
                f"{path} is not a directory: dflash wants a drafter, DflashConfig(model=...), or"
                " one beside its model"
            )
        return path

    def architecture(self, directory: pathlib.Path, setup: Setup) -> Architecture:
        """The checkpoint's, with this config's window and amplitude."""
        found = read(directory, setup.target)
        yarn = found.rotary.yarn
        if yarn and self.yarn_amplitude == "legacy":
            yarn = replace(yarn, mscale=0.0, mscale_all_dim=0.0)
        layers = found.attention
        if self.window is not None:
            windows = [min(a.window or self.window, self.window) for a in layers]
            layers = tuple(
                replace(a, window=window) for a, window in zip(layers, windows, strict=True)
            )
        if not isinstance(self.scores, dict | None) or not all(map(_is_name, self.scores or {})):
            raise TypeError(f"scores is {self.scores!r:.80}, wants lists by name")
        scores = found.scores | (self.scores or {})
        return replace(
            found, rotary=replace(found.rotary, yarn=yarn), attention=layers, scores=scores
        )


def _is_name(name: object) -> bool:
    return isinstance(name, str)


class DflashDrafter:
    """A drafter's model, and its cache of the committed tokens' features.

    The features of a token exist once the target has run it: the prompt's but the last come with
    prefill, the root's with the round that commits it.
    """

    replans = False

    def __init__(self, config: DflashConfig, setup: Setup):
        directory = config.directory(setup.directory)
        c = config.architecture(directory, setup)
        self.setup, self.taps, self.kind = setup, c.taps, str(c)
        self.nodes = nodes_of(setup, config.budget, c.block - 1)
        where = {"device": setup.device, "dtype": setup.dtype}
        positions = setup.max_seq_len + 2 * (MAX_DEPTH + 1)
        scores = ScoresConfig.from_hf(c.scores, c.block - 1)
        bigram = self._bigram(config.bigram, scores)
        checkpoint = Checkpoint(directory, prefix="model.")
        self.model = load(checkpoint, lambda w: Dflash(c, w, positions), **where)
        self.scorer = self._scorer(scores, bigram)
        self.cache = ContextCache(c, setup.sequences, setup.max_seq_len, **where)
        self.target: Deepseek | None = None

    def bind(self, model: Deepseek) -> None:
        self.target = model
        own = self.model.embed_tokens
        self.embedding = model.embed_tokens if own is None else own
        self.mask = self.model.mask(self.embedding, self.setup.dtype)
        length = torch.linalg.vector_norm(self.embedding, dim=1, dtype=torch.float32)
        mask = self.model.c.mask
        if self.model.mask_embedding is None and length[mask] < DIM * length.median():
            logger.warning(
                "the embedding of mask_token_id = %d is %.3g long, the median %.3g: the model may"
                " never have trained it",
                mask, length[mask], length.median(),
            )  # fmt: skip

    def start(self, b: int, request: int, prompt: list[int]) -> None:
        self.cache.length[b] = 0

    def prefill(self, b: int, taps: Tensor) -> None:
        only = slice(b, b + 1)
        self.model.extend(self.cache, taps, b, self._start()[only])
        self.cache.length[only] += taps.shape[1]

    def plan(self, state: State) -> int:
        return self.nodes

    def propose(self, state: State) -> TokenTree:
        hidden, logits = self.draft(state)
        score, candidate = self.scorer(logits, hidden, state)
        return grow(state, score, candidate, self.nodes, self.setup)

    def commit(self, path: Path, taps: Tensor) -> None:
        node = path.node
        if taps.device.type == "cpu":  # a row costs there what reading a length does not
            node = node[:, : int(path.length.max())]
            index = node.clamp(min=0).long()[..., None].expand(-1, -1, taps.shape[2])
            taps, node = taps.gather(1, index), None
        self.model.extend(self.cache, taps, 0, self._start(), node, path.length)
        self.cache.length += path.length

    def draft(self, state: State) -> tuple[Tensor, Tensor]:
        """The block after each root: last hidden [B, J, D] and logits [B, J, W] float32."""
        length = self.cache.length * state.active  # what has ended sees nothing
        embedded = self.model.embed(state.token, state.length, self.embedding, self.mask)
        hidden = self.model(embedded, self.cache, length)
        head = self.model.lm_head
        if head is None:
            return hidden, self.model.scaled(self.target.logits(hidden))
        return hidden, self.model.scaled(head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2]))

    def _scorer(self, scores: ScoresConfig, bigram: Bigram | None) -> Scorer:
        found, selector = self.model.selector, None
        if found is not None:
            projection = found.hidden_projection.weight
            selector = Selector(projection, found.predecessor_codebook, found.successor_codebook)
        shape = self.model.c.selector
        candidates = shape.candidates if shape else CANDIDATES
        return Scorer(scores, candidates, self.setup.device, selector, bigram)

    def _bigram(self, path: str | pathlib.Path | None, scores: ScoresConfig) -> Bigram | None:
        weighed = any(scores.bigram)
        if weighed != (path is not None):
            raise ConfigError(
                f"bigram is {path!r} and the scores weigh it by {scores.bigram}: wants a table and"
                ' a weight that is not 0, DflashConfig(bigram=..., scores={"bigram": [...]})'
            )
        return Bigram.load(path, self.setup.vocab, self.setup.device) if weighed else None

    def _start(self) -> Tensor:
        return self.cache.length
