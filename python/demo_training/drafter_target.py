"""The frozen demo model, read from its files: prefill and decoding of many sequences at once.

Both return the taps (the residual stream after named layers) and the normed last hidden state.
A cache holds latents; decoding reads them in absorbed form. Drafters and text are not known here.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from demo_training.check import Reader
from demo_training.model import (
    attend,
    dense_part,
    moe_part,
    rms,
    rotate,
)
from demo_training.shape import Shape, rotary

ROWS = 65536  # of a prefill's piece
TILE = 16  # cached positions are read in multiples of


def shape_of(config: dict) -> Shape:
    c, y = config, config["rope_scaling"]
    return Shape(
        words=c["vocab_size"],
        hidden=c["hidden_size"],
        layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        q_lora=c["q_lora_rank"],
        kv_lora=c["kv_lora_rank"],
        nope=c["qk_nope_head_dim"],
        rope=c["qk_rope_head_dim"],
        value=c["v_head_dim"],
        dense=c["intermediate_size"],
        experts=c["n_routed_experts"],
        chosen=c["num_experts_per_tok"],
        expert=c["moe_intermediate_size"],
        routed_scale=c["routed_scaling_factor"],
        theta=c["rope_theta"],
        yarn=y["factor"],
        original=y["original_max_position_embeddings"],
        eps=c["rms_norm_eps"],
    )


def layer_weights(reader: Reader, shape: Shape, i: int) -> dict[str, Tensor]:
    """The tensors of layer i as demo_training.model names them, float32."""
    at, own = f"model.layers.{i}", "mlp.shared_experts" if i else "mlp"
    names = dict(
        input_norm="input_layernorm",
        post_norm="post_attention_layernorm",
        q_a="self_attn.q_a_proj",
        q_norm="self_attn.q_a_layernorm",
        q_b="self_attn.q_b_proj",
        kv_a="self_attn.kv_a_proj_with_mqa",
        kv_norm="self_attn.kv_a_layernorm",
        kv_b="self_attn.kv_b_proj",
        o="self_attn.o_proj",
        gate=f"{own}.gate_proj",
        up=f"{own}.up_proj",
        down=f"{own}.down_proj",
    )
    w = {n: reader.weight(f"{at}.{name}") for n, name in names.items()}
    if i:
        experts = range(shape.experts)
        part = {
            n: torch.stack([reader.weight(f"{at}.mlp.experts.{e}.{n}_proj") for e in experts])
            for n in ("gate", "up", "down")
        }
        w["router"] = reader.weight(f"{at}.mlp.gate")
        w["experts_in"] = torch.cat((part["gate"], part["up"]), 1)
        w["experts_out"] = part["down"]
    return w


@dataclass(frozen=True, slots=True)
class Seen:
    """What a forward shows: taps [..., taps * D], last [..., D] (normed)."""

    taps: Tensor
    last: Tensor


class Target:
    """taps: layers whose output is shown; length: the longest sequence."""

    def __init__(
        self, model: Path, taps: tuple[int, ...], length: int, device: torch.device
    ) -> None:
        reader = Reader(model)
        self.config = json.loads((model / "config.json").read_text())
        self.shape, self.taps, self.device = shape_of(self.config), taps, device
        self.low = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.backend = "math" if device.type == "cpu" else "flash"
        self.layers, self.bias = [], []
        for i in range(self.shape.layers):
            w = layer_weights(reader, self.shape, i)
            self.layers.append({n: x.to(device, self.low).contiguous() for n, x in w.items()})
            bias = reader.t[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] if i else None
            self.bias.append(bias.to(device) if i else None)
        self.embed = reader.weight("model.embed_tokens").to(device, self.low)
        self.norm = reader.weight("model.norm").to(device, self.low)
        self.head = reader.weight("lm_head").to(device)  # float32; what is below it is rounded
        self.angles = rotary(self.shape, length, device)

    def cache(self, sequences: int, length: int) -> Tensor:
        """[L, B, S, C + R] zeros."""
        width = self.shape.kv_lora + self.shape.rope
        size = (self.shape.layers, sequences, -(-length // TILE) * TILE, width)
        return torch.zeros(size, dtype=self.low, device=self.device)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: Tensor | None = None) -> Seen:
        """tokens [B, T] from position 0 on; their latents go into the cache [L, B, S, C + R]."""
        each = max(1, ROWS // tokens.shape[1])
        pieces = [
            self._prefill(rows, None if cache is None else cache[:, at * each : (at + 1) * each])
            for at, rows in enumerate(tokens.split(each))
        ]
        return Seen(torch.cat([x.taps for x in pieces]), torch.cat([x.last for x in pieces]))

    def _prefill(self, tokens: Tensor, cache: Tensor | None) -> Seen:
        s, (b, t) = self.shape, tokens.shape
        cos, sin = (a[:t].repeat(b, 1) for a in self.angles)

        def heads(i: int, x: Tensor) -> Tensor:
            q, stored = self._projected(i, x, cos, sin)
            if cache is not None:
                cache[i, :, :t] = stored.view(b, t, -1)
            latent, k_rope = stored.split((s.kv_lora, s.rope), -1)
            kv = F.linear(latent, self.layers[i]["kv_b"]).unflatten(1, (s.heads, -1))
            k, v = kv.split((s.nope, s.value), -1)
            k = torch.cat((k, k_rope[:, None].expand(-1, s.heads, -1)), -1)
            if self.backend == "flash":  # it wants one head size
                v = F.pad(v, (0, s.nope + s.rope - s.value))
            return attend(s, self.backend, b, q, k, v.contiguous())

        seen = self._forward(tokens.flatten(), heads)
        return Seen(seen.taps.view(b, t, -1), seen.last.view(b, t, -1))

    @torch.no_grad()
    def decode(self, token: Tensor, position: int, cache: Tensor) -> Seen:
        """token [B] at a position that all sequences share; reads and extends the cache."""
        s, b = self.shape, len(token)
        cos, sin = (a[position].expand(b, -1) for a in self.angles)
        length = (position // TILE + 1) * TILE
        future = torch.arange(length, device=self.device) > position

        def heads(i: int, x: Tensor) -> Tensor:
            q, stored = self._projected(i, x, cos, sin)
            cache[i, :, position] = stored
            up = self.layers[i]["kv_b"].view(s.heads, s.nope + s.value, s.kv_lora)
            q_nope, q_rope = q.split((s.nope, s.rope), -1)
            absorbed = torch.einsum("bhp,hpc->bhc", q_nope, up[:, : s.nope])
            past = cache[i, :, :length]
            score = torch.bmm(torch.cat((absorbed, q_rope), -1), past.mT).float() * s.scale
            share = score.masked_fill(future, -math.inf).softmax(-1).to(self.low)
            read = torch.bmm(share, past[..., : s.kv_lora])
            return torch.einsum("bhc,hvc->bhv", read, up[:, s.nope :])

        return self._forward(token, heads)

    def _projected(self, i: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, H, P + R] and what the cache holds [T, C + R] of the stream x [T, D]."""
        s, w = self.shape, self.layers[i]
        x = rms(x, w["input_norm"], s.eps)
        q = F.linear(rms(F.linear(x, w["q_a"]), w["q_norm"], 1e-6), w["q_b"])
        q_nope, q_rope = q.unflatten(1, (s.heads, -1)).split((s.nope, s.rope), -1)
        latent, k_rope = F.linear(x, w["kv_a"]).split((s.kv_lora, s.rope), -1)
        k_rope = rotate(k_rope[:, None], cos, sin)[:, 0]
        stored = torch.cat((rms(latent, w["kv_norm"], 1e-6), k_rope), -1)
        return torch.cat((q_nope, rotate(q_rope, cos, sin)), -1), stored

    def _forward(self, tokens: Tensor, heads) -> Seen:
        """tokens [T]; heads(i, x) is the attention of layer i on the stream x."""
        s, x, kept = self.shape, F.embedding(tokens, self.embed), []
        for i, w in enumerate(self.layers):
            read = heads(i, x)
            if i:
                x, _ = moe_part(s, "grouped", x, read, w, self.bias[i])
            else:
                x = dense_part(s, x, read, w)
            if i in self.taps:
                kept.append(x)
        return Seen(torch.cat(kept, -1), rms(x, self.norm, s.eps))

    def logits(self, last: Tensor) -> Tensor:
        """[..., W] float32."""
        return F.linear(last.float(), self.head)
