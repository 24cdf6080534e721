"""A DFlash drafter in float64, each round from scratch: nothing is cached, nothing is chunked.

Sources: arXiv 2602.06036, section 4; for convolutions and the window's edges the published
checkpoints' own code. Letters: S committed tokens, N slots of the block, D hidden, H heads, G key
heads, d features of a head. `c` is the drafter's config.json.
"""

import numpy as np

from model_ref.forward import rms_norm, rope_table, rotate, softmax, swiglu


class Drafter:
    """config: config.json, rope as forward.rope_table takes it; w: name to float64 array; embed,
    head: the target's [W, D], used where the drafter has none of its own."""

    def __init__(self, config: dict, rope: dict, w: dict, embed: np.ndarray, head: np.ndarray):
        self.c, self.inner, self.rope, self.w = config, config["dflash_config"], rope, w
        self.embed = w.get("embed_tokens.weight", embed)
        self.head = w.get("lm_head.weight", head)
        self.slots = config.get("block_size") or self.inner["block_size"]

    def features(self, taps: np.ndarray) -> np.ndarray:
        """taps: [S, m * D], the target's streams side by side; returns [S, D]."""
        fused = taps @ self.w["fc.weight"].T
        return rms_norm(fused, self.w["hidden_norm.weight"], self.c["rms_norm_eps"])

    def round(self, features: np.ndarray, root: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the block whose first slot is the root, after S tokens: normed hidden [N - 1, D] and
        logits [N - 1, W]. features: [S, D]"""
        c, w, eps = self.c, self.w, self.c["rms_norm_eps"]
        h = self.embed[[root] + [self.inner["mask_token_id"]] * (self.slots - 1)]
        if "mask_embedding" in w:
            h[1:] = w["mask_embedding"]
        h = h * self.inner.get("input_embedding_scale", 1.0)
        for i in range(c["num_hidden_layers"]):
            name = f"layers.{i}"
            x = rms_norm(h, w[f"{name}.input_layernorm.weight"], eps)
            h = h + self.around(f"{name}.attention_conv", x, self.attention, i, features)
            x = rms_norm(h, w[f"{name}.post_attention_layernorm.weight"], eps)
            h = h + self.around(f"{name}.mlp_conv", x, swiglu, w, f"{name}.mlp")
        hidden = rms_norm(h, w["norm.weight"], eps)[1:]
        logits = hidden @ self.head.T * self.inner.get("output_multiplier", 1.0)
        cap = self.inner.get("final_logit_softcapping")
        return hidden, np.tanh(logits / cap) * cap if cap else logits

    def attention(self, x: np.ndarray, i: int, features: np.ndarray) -> np.ndarray:
        """x: [N, D], normed; features: [S, D], not normed again."""
        c, name, S, N = self.c, f"layers.{i}.self_attn", len(features), len(x)
        H, G, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q, k, v, o = (self.w[f"{name}.{part}_proj.weight"] for part in "qkvo")
        both = np.concatenate([features, x])
        eps = c["rms_norm_eps"]
        q = rms_norm((x @ q.T).reshape(N, H, d), self.w[f"{name}.q_norm.weight"], eps)
        k = rms_norm((both @ k.T).reshape(S + N, G, d), self.w[f"{name}.k_norm.weight"], eps)
        v = (both @ v.T).reshape(S + N, G, d)
        position = np.arange(S + N)
        cos, sin = rope_table(self.rope, d, position)
        q, k = rotate(q, cos[S:], sin[S:], False), rotate(k, cos, sin, False)
        k, v = np.repeat(k, H // G, 1), np.repeat(v, H // G, 1)
        score = np.einsum("nhd,shd->hns", q, k) * d**-0.5
        weight = softmax(np.where(self.visible(i, position[S:, None], position), score, -np.inf))
        return np.einsum("hns,shd->nhd", weight, v).reshape(N, -1) @ o.T

    def visible(self, i: int, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """A layer with a window looks ahead in the block only where is_causal is false."""
        kinds = self.c.get("layer_types")
        sliding = bool(kinds) and kinds[i] == "sliding_attention"
        causal = self.c.get("is_causal", sliding)
        seen = np.ones(np.broadcast_shapes(query.shape, key.shape), bool)
        if sliding:
            seen &= abs(query - key) < self.c["sliding_window"]
        return seen & (key <= query) if causal else seen

    def around(self, name: str, x: np.ndarray, sublayer, *rest) -> np.ndarray:
        """The sublayer, between its two convolutions where it has them."""
        if f"{name}.base_kernel" not in self.w:
            return sublayer(x, *rest)
        dynamic = x @ self.w[f"{name}.kernel_projection.weight"].T
        dynamic = dynamic.reshape(len(x), 2, self.inner["conv_kernel_size"], -1)
        y = sublayer(self.convolve(f"{name}.base_kernel", x, dynamic, 0), *rest)
        return self.convolve(f"{name}.base_kernel", y, dynamic, 1)

    def convolve(self, name: str, x: np.ndarray, dynamic: np.ndarray, which: int) -> np.ndarray:
        base, out = self.w[name][which], np.zeros_like(x)
        for i in range(len(x)):
            for t in range(min(len(base), i + 1)):
                for c in range(x.shape[1]):
                    group = c // self.inner["conv_group_size"]
                    out[i, c] += (base[t, c] + dynamic[i, which, t, group]) * x[i - t, c]
        return out
