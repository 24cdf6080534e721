"""The demo model as a function of its weights: DeepSeek-V3's block, written to train fast.

Weights of all layers lie in one tensor a kind ([L, out, in]; M = L - 1 MoE layers), in float32;
products run in bfloat16. A block is a pure function of tensors of one shape, so one compiled
graph serves all MoE layers. Routed experts run in one of three ways, equal but for rounding:
"grouped" (ragged products), "bucket" (equal padded buckets; overflow is dropped) and "dense"
(every expert on every row). Optimiser, data and files are not known here.

Shape letters: B sequences, T rows, D hidden, H heads, Q query rank, C latent, P nope, R rope,
V value head, E experts, K experts a row, F expert width, W words, L layers, M MoE layers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from demo_training.shape import Shape, Weights

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Spread(torch.autograd.Function):
    """Rows to expert slots: x[source], whose backward is a gather too, not an atomic sum."""

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return grad[slot].sum(1), None, None


class Collect(torch.autograd.Function):
    """Expert slots back to rows: y[slot]; `choice` [slots] is its inverse, -1 for padding."""

    @staticmethod
    def forward(ctx, y: Tensor, slot: Tensor, choice: Tensor) -> Tensor:
        ctx.save_for_backward(choice)
        return y[slot]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (choice,) = ctx.saved_tensors
        rows = grad.flatten(0, 1).index_select(0, choice.clamp(min=0))
        return rows * (choice >= 0)[:, None].to(rows.dtype), None, None


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, R], pairs (2i, 2i + 1) turned by the angle of their position, [T, R/2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def project(
    shape: Shape, padded: bool, x: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of MLA, un-absorbed, [T, H, .], of the residual stream x [T, D]."""
    s = shape
    x = rms(x, w["input_norm"], s.eps)
    q = F.linear(rms(F.linear(x, w["q_a"]), w["q_norm"], 1e-6), w["q_b"])
    q_nope, q_rope = q.unflatten(1, (s.heads, -1)).split((s.nope, s.rope), -1)
    latent, k_rope = F.linear(x, w["kv_a"]).split((s.kv_lora, s.rope), -1)
    kv = F.linear(rms(latent, w["kv_norm"], 1e-6), w["kv_b"]).unflatten(1, (s.heads, -1))
    k_nope, v = kv.split((s.nope, s.value), -1)
    k_rope = rotate(k_rope[:, None], cos, sin).expand(-1, s.heads, -1)
    if padded:  # flash attention wants one head size
        v = F.pad(v, (0, s.nope + s.rope - s.value))
    q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1)
    return q, torch.cat((k_nope, k_rope), -1), v.contiguous()


def attend(shape: Shape, backend: str, b: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention within each of b sequences, [T, H, .]. Not compiled: one graph of the
    rest then serves every length."""
    q, k, v = (z.unflatten(0, (b, -1)).transpose(1, 2) for z in (q, k, v))
    with sdpa_kernel(BACKENDS[backend]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.scale)
    return out.transpose(1, 2).flatten(0, 1)


def joined(shape: Shape, x: Tensor, heads: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The residual stream after attention, and its norm."""
    x = x + F.linear(heads[..., : shape.value].flatten(1), w["o"])
    return x, rms(x, w["post_norm"], shape.eps)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def route(shape: Shape, x: Tensor, router: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Which experts, one-hot [T, K, E], and how much of each [T, K]; ties to the lower id."""
    s = torch.sigmoid(F.linear(x.float(), router.float()))
    c = (s + bias).detach()
    mine, other = c[:, :, None], c[:, None, :]
    e = torch.arange(shape.experts, device=x.device)
    before = (other > mine) | ((other == mine) & (e[None, :] < e[:, None]))
    rank = before.sum(-1)
    chosen = rank[:, None, :] == torch.arange(shape.chosen, device=x.device)[None, :, None]
    weight = (s[:, None, :] * chosen).sum(-1)
    return chosen, weight / (weight.sum(-1, keepdim=True) + 1e-20) * shape.routed_scale


def place(shape: Shape, way: str, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where each row's choices go: slot [T, K], kept [T, K], choice [slots], ends [E].

    Expert e owns slots from one end to the next: in "grouped" as many as it has rows, rounded up
    to 8; in "bucket" 1.5 times its fair share.
    """
    t, k, e = chosen.shape
    mine = chosen.any(1)
    before = mine.T.int().contiguous().cumsum(1).T - 1  # [T, E]: rows of this expert before
    if way == "bucket":
        room = -(-t * k * 3 // (e * 16)) * 8
        ends = torch.arange(1, e + 1, device=chosen.device) * room
        begins, slots = ends - room, e * room
        kept = (chosen & (before < room)[:, None]).any(-1)
        before = before.clamp(max=room - 1)
    else:
        sizes = (mine.sum(0) + 7) // 8 * 8
        ends = sizes.cumsum(0)
        begins, slots = ends - sizes, t * k + 8 * e
        kept = torch.ones(t, k, dtype=torch.bool, device=chosen.device)
    slot = (chosen * (before + begins)[:, None]).sum(-1)
    choice = torch.full((slots,), -1, dtype=torch.int64, device=chosen.device)
    choice = choice.scatter(0, slot.flatten(), torch.arange(t * k, device=chosen.device))
    return slot, kept, choice, ends.int()


def experts(
    shape: Shape, way: str, x: Tensor, chosen: Tensor, weight: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """Sum of the chosen experts' outputs; x [T, D], w_in [E, 2F, D], w_out [E, D, F]."""
    f = shape.expert
    if way == "dense":
        share = (weight[:, :, None] * chosen).sum(1).to(x.dtype)  # [T, E]
        gate, up = (w.flatten(0, 1) for w in w_in.split(f, 1))
        h = F.silu(F.linear(x, gate)) * F.linear(x, up)
        h = (h.unflatten(1, (-1, f)) * share[:, :, None]).flatten(1)
        return h @ w_out.transpose(1, 2).flatten(0, 1)
    slot, kept, choice, ends = place(shape, way, chosen)
    rows = Spread.apply(x, choice.clamp(min=0) // shape.chosen, slot)
    if way == "grouped":
        both = F.grouped_mm(rows, w_in.transpose(1, 2), offs=ends)
        h = F.silu(both[:, :f]) * both[:, f:]
        y = F.grouped_mm(h, w_out.transpose(1, 2), offs=ends)
    else:
        both = torch.bmm(rows.unflatten(0, (shape.experts, -1)), w_in.transpose(1, 2))
        h = F.silu(both[..., :f]) * both[..., f:]
        y = torch.bmm(h, w_out.transpose(1, 2)).flatten(0, 1)
    y = Collect.apply(y, slot, choice)
    return (y * (weight * kept)[:, :, None].to(y.dtype)).sum(1)


def dense_part(shape: Shape, x: Tensor, heads: Tensor, w: dict[str, Tensor]) -> Tensor:
    x, y = joined(shape, x, heads, w)
    return x + swiglu(y, w["gate"], w["up"], w["down"])


def moe_part(
    shape: Shape, way: str, x: Tensor, heads: Tensor, w: dict[str, Tensor], bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the residual stream and the number of rows of each expert, [E]."""
    x, y = joined(shape, x, heads, w)
    chosen, weight = route(shape, y, w["router"], bias)
    routed = experts(shape, way, y, chosen, weight, w["experts_in"], w["experts_out"])
    return x + swiglu(y, w["gate"], w["up"], w["down"]) + routed, chosen.sum((0, 1))


def token_loss(shape: Shape, x: Tensor, norm: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """-log p of each row's target, [T] float32."""
    logits = F.linear(rms(x, norm, shape.eps), head).float()
    return logits.logsumexp(-1) - logits.gather(-1, target[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class Parts:
    """The pieces that a forward is made of, compiled or plain; all see rows, not sequences."""

    project: Callable
    dense: Callable
    moe: Callable
    loss: Callable

    @staticmethod
    def make(compiled: bool) -> "Parts":
        parts = (project, dense_part, moe_part, token_loss)
        if compiled:
            parts = tuple(torch.compile(p, dynamic=False, fullgraph=True) for p in parts)
        return Parts(*parts)


ATTENTION = ("input_norm", "post_norm", "q_norm", "kv_norm", "q_a", "q_b", "kv_a", "kv_b", "o")


def forward(
    parts: Parts,
    weights: Weights,
    experts_in: Tensor,
    experts_out: Tensor,
    tokens: Tensor,
    angles: tuple[Tensor, Tensor],
    backend: str,
    way: str,
) -> tuple[Tensor, Tensor]:
    """The residual stream after the last layer, [B * T, D], and the expert loads [M, E].

    experts_in, experts_out: the routed experts as they run, in the activations' dtype
    """
    s, (b, t) = weights.shape, tokens.shape
    cos, sin = (a[:t].repeat(b, 1) for a in angles)
    low = {
        n: p.to(experts_in.dtype).unbind(0)
        for n, p in weights.named_parameters()
        if p.ndim > 1 and n not in ("embed", "head", "experts_in", "experts_out")
    }
    low |= dict(experts_in=experts_in.unbind(0), experts_out=experts_out.unbind(0))
    x = F.embedding(tokens.flatten(), weights.embed).to(experts_in.dtype)
    loads = []
    for i in range(s.layers):
        m, own = i - 1, "shared" if i else "dense"
        pair = 2 * m if i else 0
        w = {n: low[n][i] for n in ATTENTION} | dict(
            gate=low[f"{own}_in"][pair], up=low[f"{own}_in"][pair + 1], down=low[f"{own}_out"][m]
        )
        q, k, v = parts.project(s, backend == "flash", x, w, cos, sin)
        heads = attend(s, backend, b, q, k, v)
        if i == 0:
            x = parts.dense(s, x, heads, w)
            continue
        w |= {n: low[n][m] for n in ("router", "experts_in", "experts_out")}
        x, load = parts.moe(s, way, x, heads, w, weights.bias[m])
        loads.append(load)
    return x, torch.stack(loads)
