"""An independent look at a saved demo model: float32 on a CPU, one expert and one row at a time.

Reads only the saved files and shares no code with the training, so that a fault in either shows:
tensor names, INT4 packing, rotary pairs, YaRN's scale, routing.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


def check(model: Path, tolerance: float = 0.02) -> None:
    """Recomputes the held-out loss of the windows in train_log.json; raises if it differs."""
    log = json.loads((model / "train_log.json").read_text())
    net = Reader(model)
    for kind, figures in log["held_out"].items():
        windows = torch.tensor(figures["check"]["windows"])
        nats = sum(float(net.loss(row)) for row in windows) / len(windows)
        logged = figures["check"]["nats"]
        print(f"{kind}: {nats:.4f} nats/token here, {logged:.4f} in the log", flush=True)
        if not abs(nats - logged) < tolerance:
            raise ValueError(f"{kind}: {nats} and {logged} differ by more than {tolerance}")
    (model / "samples.txt").write_text(show(log["samples"]))
    print(f"samples written to {model / 'samples.txt'}")


def show(samples: list[dict]) -> str:
    return "\n".join(
        f"{'=' * 30} {x['kind']}, temperature {x['temperature']}\n{x['prompt']}\n"
        f"{'-' * 30}>\n{x['text']}\n"
        for x in samples
    )


class Reader:
    """The checkpoint's tensors, and what the config says they mean."""

    def __init__(self, model: Path) -> None:
        self.c = json.loads((model / "config.json").read_text())
        index = json.loads((model / "model.safetensors.index.json").read_text())
        self.t: dict[str, Tensor] = {}
        for file in sorted(set(index["weight_map"].values())):
            self.t |= load_file(model / file)
        if set(self.t) != set(index["weight_map"]):
            raise ValueError("the index and the shards name different tensors")

    def weight(self, name: str) -> Tensor:
        if f"{name}.weight" in self.t:
            return self.t[f"{name}.weight"].float()
        out, inside = self.t[f"{name}.weight_shape"].tolist()
        words = self.t[f"{name}.weight_packed"]
        codes = torch.stack([(words >> (4 * j)) & 15 for j in range(8)], -1).flatten(1)[:, :inside]
        scale = self.t[f"{name}.weight_scale"].float().repeat_interleave(32, 1)
        if codes.shape != (out, inside):
            raise ValueError(f"{name}: {tuple(codes.shape)} is not {(out, inside)}")
        return (codes - 8).float() * scale

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.weight(name)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = x @ self.weight(f"{name}.gate_proj").T, x @ self.weight(f"{name}.up_proj").T
        return (F.silu(gate) * up) @ self.weight(f"{name}.down_proj").T

    def turned(self, x: Tensor) -> Tensor:
        """x [T, R] as R/2 complex numbers, each turned by its position's angle."""
        y = self.c["rope_scaling"]
        size, base = self.c["qk_rope_head_dim"], self.c["rope_theta"]
        context = y["original_max_position_embeddings"]

        def dimension(turns: float) -> float:
            return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = math.floor(dimension(y["beta_fast"])), math.ceil(dimension(y["beta_slow"]))
        low, high = max(low, 0), min(high, size - 1)
        angles = []
        for i in range(size // 2):
            blend = min(max((i - low) / (high - low), 0), 1)
            plain = base ** (-2 * i / size)
            angles.append(plain * (1 - blend) + plain / y["factor"] * blend)
        phase = torch.arange(len(x)).double()[:, None] * torch.tensor(angles).double()
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * torch.polar(torch.ones_like(phase), phase)
        return torch.view_as_real(turned).flatten(-2).float()

    def attention(self, x: Tensor, at: str) -> Tensor:
        c = self.c
        p, r, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        low = self.norm(x @ self.weight(f"{at}.q_a_proj").T, f"{at}.q_a_layernorm", 1e-6)
        q = (low @ self.weight(f"{at}.q_b_proj").T).unflatten(1, (-1, p + r))
        both = x @ self.weight(f"{at}.kv_a_proj_with_mqa").T
        latent = self.norm(both[:, : c["kv_lora_rank"]], f"{at}.kv_a_layernorm", 1e-6)
        shared = self.turned(both[:, c["kv_lora_rank"] :])
        kv = (latent @ self.weight(f"{at}.kv_b_proj").T).unflatten(1, (-1, p + v))
        y = c["rope_scaling"]
        scale = (p + r) ** -0.5 * (0.1 * y["mscale_all_dim"] * math.log(y["factor"]) + 1) ** 2
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        heads = []
        for h in range(c["num_attention_heads"]):
            score = q[:, h, :p] @ kv[:, h, :p].T + self.turned(q[:, h, p:]) @ shared.T
            share = (score * scale).masked_fill(future, -math.inf).softmax(-1)
            heads.append(share @ kv[:, h, p:])
        return torch.cat(heads, 1) @ self.weight(f"{at}.o_proj").T

    def moe(self, x: Tensor, at: str) -> Tensor:
        c, out = self.c, self.mlp(x, f"{at}.shared_experts")
        scores = torch.sigmoid(x @ self.weight(f"{at}.gate").T)
        biased = scores + self.t[f"{at}.gate.e_score_correction_bias"]
        order = biased.sort(dim=-1, descending=True, stable=True).indices
        picked = order[:, : c["num_experts_per_tok"]]
        weight = scores.gather(1, picked)
        weight = weight / (weight.sum(1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
        for e in range(c["n_routed_experts"]):
            row, place = (picked == e).nonzero(as_tuple=True)
            if len(row):
                part = self.mlp(x[row], f"{at}.experts.{e}") * weight[row, place, None]
                out = out.index_add(0, row, part)
        return out

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        c, x = self.c, self.weight("model.embed_tokens")[tokens]
        for i in range(c["num_hidden_layers"]):
            at, eps = f"model.layers.{i}", c["rms_norm_eps"]
            x = x + self.attention(self.norm(x, f"{at}.input_layernorm", eps), f"{at}.self_attn")
            y = self.norm(x, f"{at}.post_attention_layernorm", eps)
            dense = i < c["first_k_dense_replace"]
            x = x + (self.mlp(y, f"{at}.mlp") if dense else self.moe(y, f"{at}.mlp"))
        return self.norm(x, "model.norm", c["rms_norm_eps"]) @ self.weight("lm_head").T

    def loss(self, row: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(row[:-1]), row[1:])
