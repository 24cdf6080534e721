"""The demo's drafter as a function of its weights: DFlash's block, written to train fast.

Many blocks of one sequence share its context: features of the target at every token, of which a
block at anchor s (its slot 0, a token that is known) sees those before s. Slots of a block see
each other. Weights of all layers lie in one float32 tensor a kind. Optimiser and files are not
known here.

Shape letters: B sequences, T tokens, A anchors a sequence, N slots (the block), D hidden, H and G
heads of queries and of keys, d of a head, L layers, W words, r rank of the selector.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_training.model import rms, swiglu

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of the drafter; `small()` is for trying the whole path on a CPU."""

    words: int = 8192
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head: int = 32
    width: int = 704
    block: int = 8
    taps: tuple[int, ...] = (1, 3, 5, 7)
    rank: int = 32
    candidates: int = 32
    mask: int = 2
    theta: float = 10000.0
    eps: float = 1e-6

    @staticmethod
    def small() -> "DraftShape":
        return DraftShape(layers=2, heads=4, kv_heads=2, width=64, taps=(3, 7), rank=8)

    @property
    def slots(self) -> int:
        """That predict: all but slot 0."""
        return self.block - 1


def angles(shape: DraftShape, position: Tensor) -> Angles:
    """cos and sin, [n, d/2] float32, of integer positions [n]."""
    index = torch.arange(0, shape.head, 2, dtype=torch.float64, device=position.device)
    angle = position[:, None].double() * shape.theta ** (-index / shape.head)
    return angle.cos().float(), angle.sin().float()


def turned(x: Tensor, turn: Angles) -> Tensor:
    """x [n, heads, d], pairs (i, i + d/2) turned by the angles [n, d/2] of their position."""
    low, high = x.float().chunk(2, -1)
    cos, sin = (z[:, None] for z in turn)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def context(taps: Tensor, fc: Tensor, norm: Tensor, eps: float) -> Tensor:
    """What every layer reads of the target: [B * T, D] of taps [B * T, taps * D]."""
    return rms(F.linear(taps, fc), norm, eps)


def keys(s: DraftShape, x: Tensor, w: dict[str, Tensor], turn: Angles) -> tuple[Tensor, Tensor]:
    k = F.linear(x, w["k"]).unflatten(1, (s.kv_heads, s.head))
    v = F.linear(x, w["v"]).unflatten(1, (s.kv_heads, s.head))
    return turned(rms(k, w["k_norm"], s.eps), turn), v


def attend(
    s: DraftShape, anchor: Tensor, q: Tensor, k: Tensor, v: Tensor, far_k: Tensor, far_v: Tensor
) -> Tensor:
    """Attention of blocks [B * A * N, ., d] over the context before their anchors and themselves.

    anchor [B, A]; far_k, far_v [B * T, G, d]; returns [B * A * N, H * d]. One softmax over both.
    """
    (b, a), n, g, d = anchor.shape, s.block, s.kv_heads, s.head
    each, t = s.heads // g, len(far_k) // len(anchor)
    q = q.view(b, a, n, g, each, d).permute(0, 3, 1, 4, 2, 5)  # [B, G, A, each, N, d]
    k, v = (z.view(b, a, n, g, d).permute(0, 3, 1, 2, 4) for z in (k, v))
    far_k, far_v = (z.view(b, t, g, d).transpose(1, 2) for z in (far_k, far_v))
    rows = q.reshape(b, g, a * each * n, d)
    far = (rows @ far_k.mT).view(b, g, a, each * n, t).float() * d**-0.5
    near = (rows.view(b, g, a, each * n, d) @ k.mT).float() * d**-0.5
    seen = torch.arange(t, device=anchor.device) < anchor[:, None, :, None, None]
    far = far.masked_fill(~seen, float("-inf"))
    top = torch.maximum(far.amax(-1), near.amax(-1)).detach()[..., None]
    far, near = (far - top).exp(), (near - top).exp()
    total = far.sum(-1) + near.sum(-1)
    read = far.to(v.dtype).view(b, g, a * each * n, t) @ far_v
    out = read.view(b, g, a, each * n, d) + near.to(v.dtype) @ v
    out = (out.float() / total[..., None]).to(v.dtype).view(b, g, a, each, n, d)
    return out.permute(0, 2, 4, 1, 3, 5).reshape(b * a * n, s.heads * d)


def layer(
    s: DraftShape,
    x: Tensor,
    far: Tensor,
    w: dict[str, Tensor],
    turn: Angles,
    far_turn: Angles,
    anchor: Tensor,
) -> Tensor:
    """x [B * A * N, D] the blocks' stream; far [B * T, D] the context."""
    y = rms(x, w["input_norm"], s.eps)
    q = F.linear(y, w["q"]).unflatten(1, (s.heads, s.head))
    q = turned(rms(q, w["q_norm"], s.eps), turn)
    read = attend(s, anchor, q, *keys(s, y, w, turn), *keys(s, far, w, far_turn))
    x = x + F.linear(read, w["o"])
    return x + swiglu(rms(x, w["post_norm"], s.eps), w["gate"], w["up"], w["down"])


MATRICES = ("fc", "q", "k", "v", "o", "gate", "up", "down")
NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")  # a layer's
SELECTOR = ("project", "before", "after")


class DraftWeights(nn.Module):
    """Every trained tensor, float32."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = s = shape

        def matrix(count: int, out: int, inside: int, gain: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(count, out, inside) * gain * inside**-0.5)

        last = (2 * s.layers) ** -0.5  # on what adds to the residual stream
        self.fc = matrix(1, s.hidden, len(s.taps) * s.hidden)
        self.q = matrix(s.layers, s.heads * s.head, s.hidden)
        self.k = matrix(s.layers, s.kv_heads * s.head, s.hidden)
        self.v = matrix(s.layers, s.kv_heads * s.head, s.hidden)
        self.o = matrix(s.layers, s.hidden, s.heads * s.head, last)
        self.gate = matrix(s.layers, s.width, s.hidden)
        self.up = matrix(s.layers, s.width, s.hidden)
        self.down = matrix(s.layers, s.hidden, s.width, last)
        self.input_norm = nn.Parameter(torch.ones(s.layers, s.hidden))
        self.post_norm = nn.Parameter(torch.ones(s.layers, s.hidden))
        self.q_norm = nn.Parameter(torch.ones(s.layers, s.head))
        self.k_norm = nn.Parameter(torch.ones(s.layers, s.head))
        self.norm = nn.Parameter(torch.ones(s.hidden))
        self.hidden_norm = nn.Parameter(torch.ones(s.hidden))
        self.project = nn.Parameter(torch.randn(s.rank, s.hidden) * s.hidden**-0.5)
        self.before = nn.Parameter(torch.randn(s.words, s.rank))
        self.after = nn.Parameter(torch.randn(s.words, s.rank) * 0.01)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The functions that a forward is made of, compiled or plain."""

    context: object
    layer: object

    @staticmethod
    def make(compiled: bool) -> "Pieces":
        if not compiled:
            return Pieces(context, layer)
        return Pieces(*(torch.compile(f, dynamic=False, fullgraph=True) for f in (context, layer)))


def forward(
    pieces: Pieces,
    weights: DraftWeights,
    low: dict[str, Tensor],
    embed: Tensor,
    tokens: Tensor,
    taps: Tensor,
    anchor: Tensor,
) -> Tensor:
    """The normed last hidden of the slots that predict, [B, A, N - 1, D].

    low: the matrices as they run; embed [W, D]; tokens [B, T]; taps [B, T, taps * D]; anchor [B, A]
    """
    s, (b, t), device = weights.shape, tokens.shape, tokens.device
    kind = low["q"].dtype
    norms = {n: getattr(weights, n).to(kind).unbind(0) for n in NORMS}
    stacks = {n: low[n].unbind(0) for n in MATRICES if n != "fc"}
    far = pieces.context(taps.flatten(0, 1), low["fc"][0], weights.hidden_norm.to(kind), s.eps)
    far_turn = tuple(z.repeat(b, 1) for z in angles(s, torch.arange(t, device=device)))
    place = anchor[..., None] + torch.arange(s.block, device=device)
    turn = angles(s, place.flatten())
    ids = torch.full_like(place, s.mask)
    ids[..., 0] = tokens.gather(1, anchor)
    x = F.embedding(ids.flatten(), embed).to(kind)
    if torch.is_grad_enabled():
        x.requires_grad_()  # as the stream of every other layer: one graph serves all
    for i in range(s.layers):
        w = {n: stacks[n][i] for n in stacks} | {n: norms[n][i] for n in NORMS}
        x = pieces.layer(s, x, far, w, turn, far_turn, anchor)
    x = rms(x, weights.norm.to(kind), s.eps)
    return x.view(b, -1, s.block, s.hidden)[:, :, 1:]


def ahead(values: Tensor, anchor: Tensor, slots: int, shift: int) -> Tensor:
    """Of values [B, T, ...] those at anchor + shift + 0 .. slots - 1: [B, A, slots, ...]."""
    place = anchor[..., None] + shift + torch.arange(slots, device=anchor.device)
    row = torch.arange(len(values), device=values.device)[:, None, None]
    return values[row, place]


def edge(weights: DraftWeights, hidden: Tensor, before: Tensor) -> Tensor:
    """A[before] * (P h), [..., r] float32: its product with a row of `after` is the raw edge.

    hidden [..., D] of the slots; before [...] the token before each
    """
    return F.embedding(before, weights.before) * F.linear(hidden.float(), weights.project)
