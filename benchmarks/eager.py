"""The ops in eager torch, or in plain Python where torch has none: baselines and checks.

They take what the ops take, for one sequence. The products are torch's own (cuBLAS on CUDA).
"""

import heapq
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, w.shape, w, eps), total


def linear(x: Tensor, w: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return F.linear(x.to(w.dtype), w).to(out_dtype or x.dtype)


def heads(x: Tensor, w: Tensor) -> Tensor:
    """One product a head, as torch.bmm has it: x: [T, H, I], w: [H, O, I]; returns [H, T, O]."""
    return torch.bmm(x.transpose(0, 1), w.mT)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def int4_weights(codes: Tensor, scale: Tensor) -> Tensor:
    """The weights of compressed-tensors INT4 codes, [..., O, I], in the scale's dtype."""
    shifts = torch.arange(0, 32, 4, device=codes.device, dtype=torch.int32)
    values = ((codes[..., None] >> shifts) & 15).flatten(-2) - 8
    return values.to(scale.dtype) * scale.repeat_interleave(32, -1)


def moe_route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Sigmoid scores, one group, weights that add up to scale."""
    scores = logits.sigmoid()
    ids = (scores + bias).topk(k, dim=-1).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale


def moe_experts(
    x: Tensor, ids: list[list[int]], weights: Tensor, gate_up: list | Tensor, down: list | Tensor
) -> Tensor:
    """gate_up, down: each expert's matrices, by id"""
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for t, chosen in enumerate(ids):
        for k, e in enumerate(chosen):
            hidden = swiglu(F.linear(x[t : t + 1], gate_up[e]))
            y[t] += weights[t, k] * F.linear(hidden, down[e])[0].float()
    return y.to(x.dtype)


def rotate(x: Tensor, rope: Tensor, position: Tensor) -> Tensor:
    """Pairs (i, i + R / 2) of the last dimension, x: [T, ..., R]."""
    cos, sin = rope[position].view(len(x), *[1] * (x.dim() - 2), -1).chunk(2, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def mla_query(q: Tensor, w_uk: Tensor, rope: Tensor, position: Tensor) -> Tensor:
    nope, rest = q.split([w_uk.shape[2], rope.shape[1]], -1)
    latent = torch.einsum("thp,hcp->thc", nope, w_uk)
    return torch.cat([latent, rotate(rest, rope, position)], -1)


def mla_append(
    cache: Tensor, kv: Tensor, w: Tensor, eps: float, rope: Tensor, position: Tensor, slot: Tensor
) -> None:
    latent, rest = kv.split([len(w), rope.shape[1]], -1)
    rows = torch.cat([F.rms_norm(latent, w.shape, w, eps), rotate(rest, rope, position)], -1)
    cache.view(-1, kv.shape[1])[slot] = rows


def mla_attention(
    q: Tensor, cache: Tensor, pages: Tensor, mask: Tensor, latent: int, scale: float
) -> Tensor:
    """mask: [N, S + N] bool, which keys a row sees; the keys lie in the first of the pages."""
    _, N, H, _ = q.shape
    keys = cache[pages].flatten(0, 1)[: mask.shape[1]]
    scores = (q[0] @ keys.T).float() * scale
    weights = scores.masked_fill_(~mask[:, None], float("-inf")).softmax(-1).to(q.dtype)
    return (weights @ keys[:, :latent]).view(1, N, H, latent)


def fp8_rows(x: Tensor, C: int, size: int) -> Tensor:
    """Rows of a cache in FP8, `size` bytes each, of x: [..., C + R]."""
    latent, rope = x.float()[..., :C], x[..., C:].bfloat16().contiguous().view(torch.uint8)
    scale = latent.abs().amax(-1, keepdim=True) / 448
    rows = x.new_zeros((*x.shape[:-1], size), dtype=torch.uint8)
    rows[..., :C] = (latent / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    rows[..., C : C + 4] = scale.view(torch.uint8)
    rows[..., C + 16 : C + 16 + rope.shape[-1]] = rope
    return rows


def widened(rows: Tensor, C: int, R: int) -> Tensor:
    """[..., C + R] float32 of rows of a cache in FP8."""
    codes, scale = rows[..., :C].contiguous(), rows[..., C : C + 4].contiguous()
    rope = rows[..., C + 16 : C + 16 + 2 * R].contiguous().view(torch.bfloat16)
    latent = codes.view(torch.float8_e4m3fn).float() * scale.view(torch.float32)
    return torch.cat([latent, rope.float()], -1)


def mla_prefill(
    q: Tensor, k: Tensor, v: Tensor, k_rope: Tensor, rope: Tensor, scale: float
) -> Tensor:
    """Torch's own attention, keys put together and values padded as its form wants them."""
    (N, _, _), (H, keys, P) = q.shape, k.shape
    position = torch.arange(keys - N, keys, device=q.device)
    query = torch.cat([q[..., :P], rotate(q[..., P:], rope, position)], -1).transpose(0, 1)
    key = torch.cat([k, k_rope.expand(H, *k_rope.shape)], -1)
    mask = causal_lower_right(N, keys)
    return F.scaled_dot_product_attention(
        query[None], key[None], v[None], attn_mask=mask, scale=scale
    )[0].transpose(0, 1)


def block_embed(token: Tensor, length: Tensor, table: Tensor, mask: Tensor, slots: int) -> Tensor:
    root = token.gather(1, (length - 1)[:, None].long())[:, 0]
    rows = mask.repeat(len(token), slots, 1)
    rows[:, 0] = F.embedding(root, table)
    return rows


def turned(x: Tensor, norm: Tensor, eps: float, rope: Tensor, start: int) -> Tensor:
    """Heads [T, heads, width], normed and rotated, at the positions from `start` on."""
    position = torch.arange(start, start + len(x), device=x.device)
    return rotate(F.rms_norm(x.float(), norm.shape, norm.float(), eps), rope, position).to(x.dtype)


def block_attention(qkv: Tensor, norm: Tensor, eps: float, rope: Tensor, cache: Tensor) -> Tensor:
    """Every slot sees all of the cache and of the block; tensors as ops.block_attention's."""
    S, G = cache.shape[1], cache.shape[3]
    q, k, v = qkv[0].split([qkv.shape[2] - 2 * G, G, G], 1)
    q, k = turned(q, norm, eps, rope, S), turned(k, norm, eps, rope, S)
    keys, values = torch.cat([cache[0, :, 0], k]), torch.cat([cache[0, :, 1], v])
    heads = (x.transpose(0, 1) for x in (q, keys, values))
    return F.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(0, 1)[None]


def block_append(
    cache: Tensor, kv: Tensor, norm: Tensor, eps: float, rope: Tensor, start: int
) -> None:
    """All of kv's nodes, one norm for all layers; tensors as ops.block_append's."""
    layers, n = cache.view(kv.shape[2], -1, *cache.shape[1:]), kv.shape[1]
    for layer, (k, v) in zip(layers, kv[0].permute(1, 2, 0, 3, 4), strict=True):
        layer[start : start + n, 0] = turned(k, norm, eps, rope, start)
        layer[start : start + n, 1] = v


def block_conv(x: Tensor, dynamic: Tensor, base: Tensor) -> Tensor:
    """One block."""
    kernel = base.float() + dynamic.float().repeat_interleave(x.shape[1] // dynamic.shape[2], -1)
    y = torch.zeros(x.shape, device=x.device)
    for t in range(len(base)):
        y[t:] += kernel[t:, t] * x[: len(x) - t].float()
    return y.to(x.dtype)


def edge_scores(
    score: Tensor, candidate: Tensor, root: int, below: float, direction: Tensor,
    before: Tensor, after: Tensor,
) -> Tensor:  # fmt: skip
    """The selector alone, its weight and sharpening 1. below: what edges are divided by"""
    from_ = torch.cat([torch.full_like(candidate[:, :1], root), candidate[:, :-1]], 1)
    edge = (before[from_].float() * direction[:, :, None]) @ after[candidate].float().mT
    moved = score[:, :, None] + edge / below
    mass = score.logsumexp(2, keepdim=True)[..., None]
    return moved - moved.logsumexp(3, keepdim=True) + mass


def kv_compact(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """source, target: token slots"""
    rows = cache.view(len(cache), -1, cache.shape[-1])
    rows[:, target] = rows[:, source]


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return torch.topk(logits.log_softmax(-1), k, -1)


def draft_logits(logits: Tensor, temperature: float, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = a * logits.log_softmax(-1)
    if temperature:
        y += b * temperature * -torch.empty_like(y).exponential_().log()
    return y / (1 + c * temperature)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy sampling: token and log-probability."""
    logprob, token = logits.log_softmax(-1).max(-1)
    return token, logprob


def tree_build(
    score: Tensor, candidate: Tensor, root: Tensor, budget: int
) -> tuple[list[int], list[int]]:
    """Token and parent of the best-first tree's nodes, by a heap in Python."""
    scores, tokens = score[0].cpu().numpy(), candidate[0].tolist()
    token, parent, depth, place = root.tolist(), [-1], [0], [0]
    heap = []

    def push(node: int, total: np.float32) -> None:
        if depth[node] < len(scores):
            row = scores[depth[node]]
            for rank, s in enumerate(row if row.ndim == 1 else row[place[node]]):
                best = total + min(s, np.float32(0))
                heapq.heappush(heap, (-best, depth[node] + 1, node, rank))

    push(0, np.float32(0))
    while heap and len(token) <= budget:
        cost, at, above, rank = heapq.heappop(heap)
        token.append(tokens[at - 1][rank])
        parent.append(above)
        depth.append(at)
        place.append(rank)
        push(len(token) - 1, -cost)
    return token, parent


def tree_choose(parent, depth, score, factor, sizes, seconds) -> int:
    """The number of the size that brings the most a second, node by node, in Python."""
    above, at, claims, cells = (x.tolist() for x in (parent[0], depth[0], score[0], factor))
    chance, kind, brought = [], [], []
    for n, m in enumerate(above):
        if m < 0:
            chance.append(float(m == -1))
            kind.append(0)
        else:
            kind.append(2 if kind[m] else int(m in above[:n]))
            own = math.exp(min(claims[n] - claims[m], 0)) * cells[at[n] - 1][kind[n]]
            chance.append(chance[m] * min(own, 1))
        brought.append(sum(chance))
    each = zip(sizes.tolist(), seconds.tolist(), strict=True)
    rate = [brought[size - 1] / took for size, took in each]
    return rate.index(max(rate))


def tree_accept(token: Tensor, parent: Tensor, target: Tensor) -> list[int]:
    """The nodes from the root down while the target's token is a child, in Python."""
    nodes, above, wanted = token[0].tolist(), parent[0].tolist(), target[0].tolist()
    path = [0]
    while True:
        children = (
            n for n in range(len(nodes)) if above[n] == path[-1] and nodes[n] == wanted[path[-1]]
        )
        child = next(children, None)
        if child is None:
            return path
        path.append(child)


def tree_place(context: Tensor, table: Tensor, depth: Tensor, ancestors: Tensor):
    """Positions and slots."""
    index = context[:, None] + torch.arange(depth.shape[1], dtype=torch.int32, device=depth.device)
    page = table.gather(1, (index // 64).clamp(max=table.shape[1] - 1).long())
    padding = ancestors == 0
    position = (context[:, None] + depth).masked_fill(padding, -1)
    return position, (page * 64 + index % 64).masked_fill(padding, -1)


def state_commit(token, length, active, limit, stop, emitted, count, logprob, failed) -> Tensor:
    """As ops.state_commit; the last of the tokens is spare: it takes what is not kept."""
    J = emitted.shape[1]
    i = torch.arange(J, device=token.device)
    stopping = (emitted[..., None] == stop[:, None]).any(-1) & (i < count[:, None])
    stopped, room = torch.where(stopping, i, J).amin(1), limit - length
    kept = torch.minimum(torch.minimum(count, room), stopped + 1).int()
    end = torch.where(kept == room, 2, torch.where(failed, 3, 0))
    end = torch.where(stopped < kept, 1, end)
    index = torch.where(i < kept[:, None], length[:, None] + i, token.shape[1] - 1)
    token.scatter_(1, index, emitted)
    length += kept
    active &= end == 0
    bits = logprob.view(torch.int32).long()
    return torch.cat([kept[:, None].long(), end[:, None], emitted, bits], 1)
