"""The model in float64, written from the papers: un-absorbed MLA, YaRN, routing by a stable sort.

Sources: DeepSeek-V2 (2405.04434) 2.1 and 2.2, DeepSeek-V3 (2412.19437) 2.1, YaRN (2309.00071).
Shape letters: T rows, S keys, D hidden, H heads, C latent, P nope part, R rope part, V value head,
E experts, K experts a token, W vocabulary. `c` is config.json's text part, keys as they are there.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from model_ref.checkpoint import cached_fp8, from_bf16, to_bf16

INNER_EPS = 1e-6  # of the norms of the query's and the key's latents, whatever rms_norm_eps is


@dataclass
class Route:
    """ids, weights: [T, K], best first. margin: [T], the least change of one score, or of one
    group's, against another that changes the chosen set; order_margin: [T], the least gap between
    two chosen ones."""

    ids: np.ndarray
    weights: np.ndarray
    margin: np.ndarray
    order_margin: np.ndarray


@dataclass
class Trace:
    """What a forward passed through: the residual stream [T, D] of each layer, and the routers.

    latents, cached: [T, C + R] of each layer, normed latents and rotated rope parts as they are
    made and as attention reads them; with a cache in FP8 alone
    """

    after_attention: list[np.ndarray] = field(default_factory=list)
    after_mlp: list[np.ndarray] = field(default_factory=list)
    latents: list[np.ndarray] = field(default_factory=list)
    cached: list[np.ndarray] = field(default_factory=list)
    routes: dict[int, Route] = field(default_factory=dict)


class Cache:
    """Keys [S, H, P + R] and values [S, H, V] of each layer; a copy may grow on its own."""

    def __init__(self, layers: list[tuple[np.ndarray, np.ndarray]] | None = None):
        self.layers = list(layers or [])

    def copy(self) -> "Cache":
        return Cache(self.layers)

    def length(self) -> int:
        return len(self.layers[0][0]) if self.layers else 0

    def append(self, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if layer == len(self.layers):
            self.layers.append((k, v))
        else:
            old_k, old_v = self.layers[layer]
            self.layers[layer] = np.concatenate([old_k, k]), np.concatenate([old_v, v])
        return self.layers[layer]


def rms_norm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def swiglu(x: np.ndarray, w: dict, name: str) -> np.ndarray:
    gate, up = x @ w[f"{name}.gate_proj.weight"].T, x @ w[f"{name}.up_proj.weight"].T
    return (gate * sigmoid(gate) * up) @ w[f"{name}.down_proj.weight"].T


def yarn_m(factor: float, a: float) -> float:
    return 0.1 * a * math.log(factor) + 1 if factor > 1 else 1.0


def softmax_scale(c: dict, rope: dict) -> float:
    scale = (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) ** -0.5
    yarn = rope["yarn"]
    if yarn and yarn.get("mscale_all_dim"):
        scale *= yarn_m(yarn["factor"], yarn["mscale_all_dim"]) ** 2
    return scale


def yarn_range(yarn: dict, theta: float, dim: int) -> tuple[float, float]:
    """The pairs between which YaRN blends from the trained to the stretched frequencies."""

    def pair_of(rotations: float) -> float:
        length = yarn["original_max_position_embeddings"]
        return dim * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_of(yarn["beta_slow"])), dim - 1)
    return low, high if high > low else low + 0.001


def rope_table(rope: dict, dim: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin: [T, dim / 2], YaRN's factor on both included."""
    i = np.arange(dim // 2)
    frequency, factor, yarn = rope["theta"] ** (-2.0 * i / dim), 1.0, rope["yarn"]
    if yarn:
        low, high = yarn_range(yarn, rope["theta"], dim)
        stretched = np.clip((i - low) / (high - low), 0, 1)
        frequency = frequency / yarn["factor"] * stretched + frequency * (1 - stretched)
        m, m_all = yarn.get("mscale"), yarn.get("mscale_all_dim")
        factor = yarn_m(yarn["factor"], m if m and m_all else 1)
        factor /= yarn_m(yarn["factor"], m_all) if m and m_all else 1
    angle = positions[:, None] * frequency
    return np.cos(angle) * factor, np.sin(angle) * factor


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """x: [T, heads, R]; cos, sin: [T, R / 2]."""
    half = x.shape[-1] // 2
    first = slice(0, None, 2) if interleaved else slice(0, half)
    second = slice(1, None, 2) if interleaved else slice(half, None)
    a, b, cos, sin = x[..., first], x[..., second], cos[:, None], sin[:, None]
    y = np.empty_like(x)
    y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    return y


def keep_groups(choice: np.ndarray, c: dict) -> tuple[np.ndarray, float]:
    """choice: [E]. Returns it with the groups left out at -inf, and the gap at the groups' cut."""
    groups, kept = c["n_group"] or 1, c["topk_group"] or 1
    if groups == 1 or c["topk_method"] == "greedy":
        return choice, np.inf
    best = -np.sort(-choice.reshape(groups, -1), axis=1)
    score = best[:, :2].sum(1) if c["topk_method"] == "noaux_tc" else best[:, 0]
    order = np.argsort(-score, kind="stable")
    masked = np.full((groups, len(choice) // groups), -np.inf)
    masked[order[:kept]] = choice.reshape(groups, -1)[order[:kept]]
    gap = score[order[kept - 1]] - score[order[kept]] if kept < groups else np.inf
    return masked.reshape(-1), gap


def route(logits: np.ndarray, bias: np.ndarray | None, c: dict) -> Route:
    """logits: [T, E]; bias: [E] or None."""
    k, rows = c["num_experts_per_tok"], []
    scores = softmax(logits) if c["scoring_func"] == "softmax" else sigmoid(logits)
    for s in scores:
        choice, group_gap = keep_groups(s if bias is None else s + bias, c)
        order = np.argsort(-choice, kind="stable")
        ids, ranked = order[:k], choice[order[: k + 1]]
        weights = s[ids]
        if c["norm_topk_prob"]:
            weights = weights / (weights.sum() + 1e-20)
        gaps = ranked[:-1] - ranked[1:]
        cut = gaps[k - 1] if k < len(s) else np.inf
        inner = gaps[: k - 1].min() if k > 1 else np.inf
        rows.append((ids, weights * c["routed_scaling_factor"], min(cut, group_gap), inner))
    return Route(*(np.array(column) for column in zip(*rows, strict=True)))


class Model:
    """config: the text part of config.json; rope: {"theta", "yarn"}; w: name to float64 array.

    fp8_cache: attention reads latents from e4m3 with a float32 scale a row, rope from bfloat16
    """

    def __init__(self, config: dict, rope: dict, w: dict[str, np.ndarray], fp8_cache: bool = False):
        self.c, self.rope, self.w, self.fp8_cache = config, rope, w, fp8_cache

    def forward(self, ids: np.ndarray, cache: Cache) -> tuple[np.ndarray, Trace]:
        """Appends the rows to the cache; returns their logits [T, W] and what they passed."""
        c, w, trace = self.c, self.w, Trace()
        positions = cache.length() + np.arange(len(ids))
        h = w["model.embed_tokens.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            name, eps = f"model.layers.{i}", c["rms_norm_eps"]
            x = rms_norm(h, w[f"{name}.input_layernorm.weight"], eps)
            h = h + self.attention(i, x, positions, cache, trace)
            trace.after_attention.append(h)
            x = rms_norm(h, w[f"{name}.post_attention_layernorm.weight"], eps)
            h = h + self.mlp(i, x, trace)
            trace.after_mlp.append(h)
        x = rms_norm(h, w["model.norm.weight"], c["rms_norm_eps"])
        head = "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head"
        return x @ w[f"{head}.weight"].T, trace

    def attention(
        self, i: int, x: np.ndarray, positions: np.ndarray, cache: Cache, trace: Trace
    ) -> np.ndarray:
        c, T, name = self.c, len(x), f"model.layers.{i}.self_attn"
        H, C, P, R = (
            c[key]
            for key in "num_attention_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim".split()
        )
        w = {key: self.w.get(f"{name}.{key}.weight") for key in ATTENTION}
        q = x
        if c["q_lora_rank"]:
            q = rms_norm(x @ w["q_a_proj"].T, w["q_a_layernorm"], INNER_EPS)
        q = (q @ w["q_b_proj" if c["q_lora_rank"] else "q_proj"].T).reshape(T, H, P + R)
        kv = x @ w["kv_a_proj_with_mqa"].T
        latent = rms_norm(kv[:, :C], w["kv_a_layernorm"], INNER_EPS)
        cos, sin = rope_table(self.rope, R, positions)
        interleaved = c.get("rope_interleave", True)
        q_rope = rotate(q[..., P:], cos, sin, interleaved)
        k_rope = rotate(kv[:, None, C:], cos, sin, interleaved)  # one for all heads
        if self.fp8_cache:
            trace.latents.append(np.concatenate([latent, k_rope[:, 0]], -1))
            latent, k_rope = cached_fp8(latent), from_bf16(to_bf16(k_rope))
            trace.cached.append(np.concatenate([latent, k_rope[:, 0]], -1))
        expanded = (latent @ w["kv_b_proj"].T).reshape(T, H, -1)
        k = np.concatenate([expanded[..., :P], np.repeat(k_rope, H, axis=1)], -1)
        k, v = cache.append(i, k, expanded[..., P:])
        q = np.concatenate([q[..., :P], q_rope], -1)
        score = np.einsum("thd,shd->hts", q, k) * softmax_scale(c, self.rope)
        score = np.where(np.arange(len(k)) <= positions[:, None], score, -np.inf)
        out = np.einsum("hts,shv->thv", softmax(score), v)
        return out.reshape(T, -1) @ w["o_proj"].T

    def mlp(self, i: int, x: np.ndarray, trace: Trace) -> np.ndarray:
        c, w, name = self.c, self.w, f"model.layers.{i}.mlp"
        if i < c["first_k_dense_replace"]:
            return swiglu(x, w, name)
        bias = w.get(f"{name}.gate.e_score_correction_bias")
        chosen = route(x @ w[f"{name}.gate.weight"].T, bias, c)
        trace.routes[i] = chosen
        y = np.zeros_like(x)
        for t, row in enumerate(x):
            for expert, weight in zip(chosen.ids[t], chosen.weights[t], strict=True):
                y[t] += weight * swiglu(row, w, f"{name}.experts.{expert}")
        return y + swiglu(x, w, f"{name}.shared_experts") if c["n_shared_experts"] else y


ATTENTION = (
    "q_proj q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj"
).split()
