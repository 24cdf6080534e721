"""A trained demo model's files, in the layout of a Hugging Face checkpoint.

Config, weights (routed experts in compressed-tensors INT4, group 32), tokenizer and log. Reading
them back is check.py's.
"""

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo_training.quantize import GROUP, packed
from demo_training.shape import Shape
from demo_training.tokens import EOT, MASK, PAD
from demo_training.train import Trainer

SHARDS = 2


def config(shape: Shape) -> dict:
    s = shape
    scheme = dict(
        num_bits=4,
        type="int",
        symmetric=True,
        strategy="group",
        group_size=GROUP,
        actorder=None,
        dynamic=False,
    )
    return dict(
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        torch_dtype="bfloat16",
        vocab_size=s.words,
        hidden_size=s.hidden,
        intermediate_size=s.dense,
        moe_intermediate_size=s.expert,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.heads,
        q_lora_rank=s.q_lora,
        kv_lora_rank=s.kv_lora,
        qk_nope_head_dim=s.nope,
        qk_rope_head_dim=s.rope,
        v_head_dim=s.value,
        n_routed_experts=s.experts,
        n_shared_experts=1,
        num_experts_per_tok=s.chosen,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=s.routed_scale,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        hidden_act="silu",
        max_position_embeddings=int(s.original * s.yarn),
        rms_norm_eps=s.eps,
        rope_theta=s.theta,
        rope_interleave=True,
        attention_bias=False,
        attention_dropout=0.0,
        rope_scaling=dict(
            type="yarn",
            factor=s.yarn,
            original_max_position_embeddings=s.original,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        tie_word_embeddings=False,
        num_nextn_predict_layers=0,
        use_cache=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        quantization_config=dict(
            quant_method="compressed-tensors",
            format="pack-quantized",
            quantization_status="compressed",
            kv_cache_scheme=None,
            config_groups=dict(
                group_0=dict(
                    targets=["Linear"],
                    weights=scheme,
                    input_activations=None,
                    output_activations=None,
                )
            ),
            ignore=[
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
        ),
    )


@torch.no_grad()
def tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name, on the CPU."""
    w, s = trainer.weights, trainer.weights.shape
    low = {n: p.detach().bfloat16().cpu() for n, p in w.named_parameters()}
    embed = low["embed"]
    usual = embed.float().mean(0)  # rows that no text trains: the mean, at the usual length
    usual *= embed.float().norm(dim=1).median() / usual.norm()
    embed[1], embed[2] = usual.bfloat16(), usual.bfloat16()
    state = {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": low["norm"],
        "lm_head.weight": low["head"],
    }
    coded = {
        n: [x.cpu() for x in trainer.quantize(getattr(w, n).detach())]
        for n in ("experts_in", "experts_out")
    }
    for i in range(s.layers):
        at = f"model.layers.{i}."
        for name, own in (
            ("input_layernorm", "input_norm"),
            ("post_attention_layernorm", "post_norm"),
            ("self_attn.q_a_proj", "q_a"),
            ("self_attn.q_a_layernorm", "q_norm"),
            ("self_attn.q_b_proj", "q_b"),
            ("self_attn.kv_a_proj_with_mqa", "kv_a"),
            ("self_attn.kv_a_layernorm", "kv_norm"),
            ("self_attn.kv_b_proj", "kv_b"),
            ("self_attn.o_proj", "o"),
        ):
            state[f"{at}{name}.weight"] = low[own][i]
        m, own, mlp = i - 1, "shared" if i else "dense", "mlp.shared_experts." if i else "mlp."
        pair = 2 * m if i else 0
        state[f"{at}{mlp}gate_proj.weight"] = low[f"{own}_in"][pair]
        state[f"{at}{mlp}up_proj.weight"] = low[f"{own}_in"][pair + 1]
        state[f"{at}{mlp}down_proj.weight"] = low[f"{own}_out"][m if i else 0]
        if i == 0:
            continue
        state[f"{at}mlp.gate.weight"] = low["router"][m]
        state[f"{at}mlp.gate.e_score_correction_bias"] = w.bias[m].float().cpu()
        for e in range(s.experts):
            both, down = ([x[m, e] for x in coded[n]] for n in ("experts_in", "experts_out"))
            for name, code, scale in (
                ("gate", *(x[: s.expert] for x in both)),
                ("up", *(x[s.expert :] for x in both)),
                ("down", *down),
            ):
                for kind, tensor in packed(code, scale).items():
                    state[f"{at}mlp.experts.{e}.{name}_proj.{kind}"] = tensor
    return {n: t.contiguous().clone() for n, t in state.items()}


def save(out: Path, trainer: Trainer, tokenizer: Tokenizer, log: dict) -> None:
    """Writes the checkpoint; the log last, with the sizes of the rest."""
    out.mkdir(parents=True, exist_ok=True)
    state, shards = tensors(trainer), [{} for _ in range(SHARDS)]
    total, done = sum(t.nbytes for t in state.values()), 0
    for name, tensor in state.items():
        shards[min(SHARDS - 1, done * SHARDS // total)][name] = tensor
        done += tensor.nbytes
    where = {}
    for k, shard in enumerate(shards):
        file = f"model-{k + 1:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)
        where |= dict.fromkeys(shard, file)
    write(
        out / "model.safetensors.index.json",
        dict(metadata=dict(total_size=total), weight_map=where),
    )
    write(out / "config.json", config(trainer.weights.shape))
    write(
        out / "generation_config.json",
        dict(bos_token_id=0, eos_token_id=0, pad_token_id=1, do_sample=True, temperature=0.7),
    )
    write(
        out / "tokenizer_config.json",
        dict(
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token=EOT,
            eos_token=EOT,
            pad_token=PAD,
            mask_token=MASK,
            add_bos_token=False,
            clean_up_tokenization_spaces=False,
            model_max_length=4096,
        ),
    )
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    log |= facts(trainer, sorted(out.iterdir()))
    write(out / "train_log.json", log)


def facts(trainer: Any, files: list[Path]) -> dict:
    """What a log says of any training, its plan, its run and the files it made."""
    return dict(
        parameters=sum(p.numel() for p in trainer.weights.parameters()),
        plan=asdict(trainer.plan),
        run=asdict(trainer.run),
        torch=torch.__version__,
        python=platform.python_version(),
        device=device_name(trainer.device),
        bytes={path.name: path.stat().st_size for path in files},
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
