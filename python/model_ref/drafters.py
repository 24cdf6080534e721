"""The drafters that the oracle can make, each beside one of its models; and their golden rounds."""

from dataclasses import dataclass, field

import numpy as np

from model_ref.dflash import Drafter
from model_ref.forward import Cache, Model
from model_ref.variants import yarn
from model_ref.weights import ATTENTION_GAIN, Weights

BASE = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class DraftVariant:
    """change: of BASE; inner: dflash_config; own: tensors of its own among embed_tokens, lm_head
    and mask_embedding"""

    about: str
    target: str  # the model's variant
    inner: dict
    change: dict = field(default_factory=dict)
    theta: float = 10000.0
    yarn: dict | None = None
    rope_spelling: str = "rope_scaling"
    prefix: str = ""
    own: tuple[str, ...] = ()
    int4: bool = False

    def config(self, target: dict) -> dict:
        """config.json, for a target of this config.json."""
        c = BASE | {"hidden_size": target["hidden_size"], "vocab_size": target["vocab_size"]}
        c |= {"num_target_layers": target["num_hidden_layers"]} | self.change
        kind = {"rope_type": "yarn", **self.yarn} if self.yarn else {"rope_type": "default"}
        if self.rope_spelling == "rope_parameters":
            rope = {"rope_parameters": {"rope_theta": self.theta, **kind}}
        else:
            rope = {"rope_theta": self.theta, "rope_scaling": kind if self.yarn else None}
        return c | rope | {"dflash_config": self.inner}


DRAFTERS = {
    "dflash": DraftVariant(
        "the plain case: two taps, block 8 at the top level",
        "dense",
        {"mask_token_id": 7, "target_layer_ids": [0, 2]},
        {"block_size": 8, "layer_types": ["full_attention"] * 2, "sliding_window": None},
    ),
    "dflash-yarn": DraftVariant(
        "YaRN whose two mscales differ, names under model., block 16",
        "dense",
        {"mask_token_id": 511, "target_layer_ids": [1], "block_size": 16},
        {"num_hidden_layers": 3},
        yarn=yarn(8.0, 16, 4, mscale=1.0, mscale_all_dim=0.6),
        rope_spelling="rope_parameters",
        prefix="model.",
    ),
    "dflash-window": DraftVariant(
        "a causal layer with a window of 9, embedding, head and mask of its own, scaled logits",
        "dense",
        {"mask_token_id": 0, "target_layer_ids": [0, 1, 2], "block_size": 6}
        | {"input_embedding_scale": 0.5, "output_multiplier": 0.7, "final_logit_softcapping": 5.0},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
        | {"use_sliding_window": True, "max_window_layers": 2},
        own=("embed_tokens", "lm_head", "mask_embedding"),
    ),
    "dflash2": DraftVariant(
        "convolutions and a selector, all layers with a window of 12 and not causal",
        "dense",
        {"mask_token_id": 3, "target_layer_ids": [0, 2], "block_size": 5}
        | {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 24, "selector_top_k": 8},
        {"architectures": ["DFlash2DraftModel"], "layer_types": ["sliding_attention"] * 2}
        | {"sliding_window": 12, "is_causal": False},
    ),
    "dflash-int4": DraftVariant(
        "the layers' matrices and fc in INT4, beside a model with INT4 experts",
        "int4",
        {"mask_token_id": 100, "target_layer_ids": [0, 1], "block_size": 8},
        int4=True,
    ),
}


def make_weights(v: DraftVariant, c: dict, seed: int) -> Weights:
    w, D, inner = Weights(seed, "bf16"), c["hidden_size"], c["dflash_config"]
    H, G, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    matrix = w.int4 if v.int4 else w.linear
    matrix("fc", D, D * len(inner["target_layer_ids"]))
    w.norm("hidden_norm", D)
    for i in range(c["num_hidden_layers"]):
        name = f"layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            w.norm(f"{name}.{norm}", D)
        for part, out in (("q", H * d), ("k", G * d), ("v", G * d)):
            matrix(f"{name}.self_attn.{part}_proj", out, D)
        matrix(f"{name}.self_attn.o_proj", D, H * d, ATTENTION_GAIN)
        for part in "qk":
            w.norm(f"{name}.self_attn.{part}_norm", d)
        w.mlp(f"{name}.mlp", D, c["intermediate_size"], v.int4)
        if "conv_kernel_size" in inner:
            for conv in ("attention_conv", "mlp_conv"):
                add_convolution(w, f"{name}.{conv}", D, inner)
    w.norm("norm", D)
    add_extras(w, v, c)
    w.stored = {v.prefix + name: x for name, x in w.stored.items()}
    return w


def add_convolution(w: Weights, name: str, D: int, inner: dict) -> None:
    taps, groups = inner["conv_kernel_size"], D // inner["conv_group_size"]
    base = w.normal(name, 2, taps, D) * 0.3
    base[:, 0] += 1
    w.plain(f"{name}.base_kernel", base)
    w.plain_linear(f"{name}.kernel_projection", 2 * taps * groups, D, 0.3)


def add_extras(w: Weights, v: DraftVariant, c: dict) -> None:
    W, D, inner = c["vocab_size"], c["hidden_size"], c["dflash_config"]
    if "embed_tokens" in v.own:
        w.plain("embed_tokens.weight", w.normal("draft.embed_tokens", W, D))
    if "lm_head" in v.own:
        w.plain("lm_head.weight", w.normal("draft.lm_head", W, D) * 2.5 * D**-0.5)
    if "mask_embedding" in v.own:
        w.plain("mask_embedding", w.normal("mask_embedding", D))
    if "selector_rank" in inner:
        rank, name = inner["selector_rank"], "candidate_selector"
        w.plain_linear(f"{name}.hidden_projection", rank, D)
        for book in ("predecessor_codebook", "successor_codebook"):
            w.plain(f"{name}.{book}", w.normal(book, W, rank) * rank**-0.25)


def golden(
    c: dict, v: DraftVariant, w: Weights, model: Model, texts: dict[str, np.ndarray], first: int
) -> dict[str, np.ndarray]:
    """Each text's features [S, D], and its rounds: hidden [R, N - 1, D] and logits [R, N - 1, W],
    of the blocks whose roots are the tokens from number `first` on."""
    tied = model.c["tie_word_embeddings"]
    embed = model.w["model.embed_tokens.weight"]
    head = embed if tied else model.w["lm_head.weight"]
    drafter = Drafter(c, {"theta": v.theta, "yarn": v.yarn}, w.value, embed, head)
    results = {}
    for name, ids in texts.items():
        _, trace = model.forward(ids, Cache())
        taps = [trace.after_mlp[i] for i in c["dflash_config"]["target_layer_ids"]]
        features = drafter.features(np.concatenate(taps, 1))
        rounds = [drafter.round(features[:s], ids[s]) for s in range(first, len(ids))]
        results[f"{name}.features"] = features
        results[f"{name}.hidden"] = np.array([hidden for hidden, _ in rounds])
        results[f"{name}.logits"] = np.array([logits for _, logits in rounds])
    return results
