"""Weights of a variant: what the checkpoint stores, and the float64 values of just that.

A tensor depends on (seed, name, shape) alone, so variants that differ in one thing share the rest.
Gains are set so that each term counts: attention scores of sigma about 1.5, attention and MLP that
add about as much to the residual stream, logits of sigma about 2.5.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np

from model_ref import checkpoint
from model_ref.forward import yarn_m
from model_ref.variants import Variant

SCORE_SIGMA = 1.5
ATTENTION_GAIN, MLP_GAIN = 1.9, 1.1  # make up for averaging over keys, and for SiLU
PREFIX = "language_model."


@dataclass
class Weights:
    """format: bf16 or f16 for all but INT4 experts, or fp8 for the matrices of every layer"""

    seed: int
    format: str
    stored: dict[str, checkpoint.Stored] = field(default_factory=dict)
    value: dict[str, np.ndarray] = field(default_factory=dict)

    def normal(self, name: str, *shape: int) -> np.ndarray:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())]).standard_normal(shape)

    def plain(self, name: str, x: np.ndarray) -> None:
        """The nearest bfloat16; as f16, then the nearest of that: exact in both."""
        bits = checkpoint.to_bf16(x)
        self.stored[name], self.value[name] = ("BF16", bits), checkpoint.from_bf16(bits)
        if self.format == "f16":
            half = self.value[name].astype(np.float16)
            self.stored[name], self.value[name] = ("F16", half), half.astype(np.float64)

    def fp8(self, name: str, x: np.ndarray) -> None:
        """Scales of neighbouring blocks differ up to eightfold, so that one misplaced shows.

        They have four significant bits and weights too: the products are exact in bfloat16.
        """
        padded = np.pad(x, [(0, -side % checkpoint.BLOCK) for side in x.shape])
        tiles = padded.reshape(
            -(-len(x) // checkpoint.BLOCK), checkpoint.BLOCK, -1, checkpoint.BLOCK
        )
        fine = np.abs(tiles).max((1, 3)) / checkpoint.E4M3[-1]
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode()), 8])
        fraction, exponent = np.frexp(fine * 2.0 ** rng.integers(0, 4, fine.shape))
        scale = np.ldexp(np.ceil(fraction * 16) / 16, exponent)
        each = checkpoint.blocks(scale, x.shape)
        code = checkpoint.to_e4m3(x / each)
        self.value[name] = checkpoint.from_e4m3(code) * each
        self.stored[name] = "F8_E4M3", code
        self.stored[f"{name}_scale_inv"] = "F32", scale.astype(np.float32)

    def matrix(self, name: str, x: np.ndarray) -> None:
        (self.fp8 if self.format == "fp8" else self.plain)(f"{name}.weight", x)

    def linear(self, name: str, O: int, I: int, gain: float = 1.0) -> None:
        self.matrix(name, self.normal(name, O, I) * gain * I**-0.5)

    def plain_linear(self, name: str, O: int, I: int, gain: float = 1.0) -> None:
        self.plain(f"{name}.weight", self.normal(name, O, I) * gain * I**-0.5)

    def norm(self, name: str, size: int) -> None:
        self.plain(f"{name}.weight", 1 + 0.3 * self.normal(name, size))

    def int4(self, name: str, O: int, I: int, gain: float = 1.0) -> None:
        q, scale = checkpoint.quantize(self.normal(name, O, I) * gain * I**-0.5)
        self.value[f"{name}.weight"] = checkpoint.dequantize(q, scale)
        self.stored[f"{name}.weight_packed"] = "I32", checkpoint.pack(q)
        self.stored[f"{name}.weight_scale"] = "BF16", scale
        self.stored[f"{name}.weight_shape"] = "I32", np.array([O, I])

    def mlp(self, name: str, D: int, F: int, int4: bool = False) -> None:
        make = self.int4 if int4 else self.linear
        make(f"{name}.gate_proj", F, D, 1.3)
        make(f"{name}.up_proj", F, D)
        make(f"{name}.down_proj", D, F, MLP_GAIN)


def make_weights(v: Variant, seed: int) -> Weights:
    c, w = v.config(), Weights(seed, v.format)
    W, D = c["vocab_size"], c["hidden_size"]
    w.plain("model.embed_tokens.weight", w.normal("model.embed_tokens", W, D) * v.embed_std)
    for i in range(c["num_hidden_layers"]):
        name = f"model.layers.{i}"
        w.norm(f"{name}.input_layernorm", D)
        add_attention(w, f"{name}.self_attn", v, c)
        w.norm(f"{name}.post_attention_layernorm", D)
        if i < c["first_k_dense_replace"]:
            w.mlp(f"{name}.mlp", D, c["intermediate_size"])
        else:
            add_moe(w, f"{name}.mlp", v, c)
    w.norm("model.norm", D)
    if not c["tie_word_embeddings"]:
        w.plain_linear("lm_head", W, D, v.logit_std)
    if v.wrapper:
        w.stored = {PREFIX + name: x for name, x in w.stored.items()}
        w.plain_linear("vision_tower.patch_embed.proj", 8, 12)
        w.plain_linear("mm_projector.linear_1", D, 8)
    return w


def add_attention(w: Weights, name: str, v: Variant, c: dict) -> None:
    D, H, Q, C = (c[k] for k in "hidden_size num_attention_heads q_lora_rank kv_lora_rank".split())
    P, R, V = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    m = yarn_m(v.yarn["factor"], v.yarn.get("mscale_all_dim") or 0) if v.yarn else 1
    gain = SCORE_SIGMA / m**2
    if Q:
        w.linear(f"{name}.q_a_proj", Q, D, v.latent_gain)
        w.norm(f"{name}.q_a_layernorm", Q)
    w.linear(f"{name}.q_b_proj" if Q else f"{name}.q_proj", H * (P + R), Q or D, gain)
    down = w.normal(f"{name}.kv_a_proj_with_mqa", C + R, D) * D**-0.5
    down[:C] *= v.latent_gain
    w.matrix(f"{name}.kv_a_proj_with_mqa", down)
    w.norm(f"{name}.kv_a_layernorm", C)
    w.linear(f"{name}.kv_b_proj", H * (P + V), C)
    w.linear(f"{name}.o_proj", D, H * V, ATTENTION_GAIN)


def add_moe(w: Weights, name: str, v: Variant, c: dict) -> None:
    D, F, E = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    w.plain_linear(f"{name}.gate", E, D, v.router_gain)
    if c["topk_method"] == "noaux_tc":
        key = f"{name}.gate.e_score_correction_bias"
        bias = (v.bias[0] + v.bias[1] * w.normal(key, E)).astype(np.float32)
        w.stored[key], w.value[key] = ("F32", bias), bias.astype(np.float64)
    for e in range(E):
        w.mlp(f"{name}.experts.{e}", D, F, v.format == "int4")
    if c["n_shared_experts"]:
        w.mlp(f"{name}.shared_experts", D, F * c["n_shared_experts"])
