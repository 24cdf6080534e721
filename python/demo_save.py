"""What a trained demo model is worth, and its files in the layout of a Hugging Face checkpoint.

Held-out loss with bfloat16 and with INT4 routed experts, agreement of the two, loss by position,
sample continuations and how many of them loop; config, weights (compressed-tensors INT4, group
32), tokenizer and log. Reading the files back is demo_check.py's.
"""

import json
import math
import platform
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo_corpus import EOT, MASK, PAD
from demo_model import Parts, forward, rms
from demo_shape import Shape
from demo_train import LONG, Trainer

SHARDS = 2
WINDOWS = 96  # held-out windows of each set that are scored


class Judge:
    """Scores and samples a trainer's weights, with plain, un-compiled parts."""

    def __init__(self, trainer: Trainer, tokenizer: Tokenizer) -> None:
        self.trainer, self.weights = trainer, trainer.weights
        self.device, self.tokenizer = trainer.device, tokenizer
        self.parts = Parts.make(False)
        spelled = [tokenizer.id_to_token(i) or "" for i in range(self.weights.shape.words)]
        self.bytes = torch.tensor([0, 0, 0, *map(len, spelled[3:])], device=self.device)

    def logits(self, tokens: Tensor) -> Tensor:
        w, plan, routed = self.weights, self.trainer.plan, self.trainer.routed
        x, _ = forward(
            self.parts,
            w,
            routed["experts_in"],
            routed["experts_out"],
            tokens,
            self.trainer.angles,
            plan.backend,
            plan.way,
        )
        x = rms(x.view(*tokens.shape, -1), w.norm.to(x.dtype), w.shape.eps)
        return (x @ w.head.to(x.dtype).T).float()

    @torch.no_grad()
    def score(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """-log p of every target and the most likely token, [N, T]."""
        loss, best = [], []
        for rows in windows.split(max(1, 16384 // windows.shape[1])):
            logits = self.logits(rows[:, :-1])
            picked = logits.gather(-1, rows[:, 1:, None])[..., 0]
            loss.append(logits.logsumexp(-1) - picked)
            best.append(logits.argmax(-1))
        return torch.cat(loss), torch.cat(best)

    def figures(self, windows: Tensor, loss: Tensor) -> dict[str, float]:
        nats, size = float(loss.double().sum()), int(self.bytes[windows[:, 1:]].sum())
        return dict(
            nats_per_token=round(nats / loss.numel(), 4),
            bits_per_byte=round(nats / math.log(2) / size, 4),
            windows=len(windows),
        )

    def held_out(self, sets: dict[str, np.ndarray]) -> dict:
        """All held-out figures, and the windows that `check` recomputes."""
        t, result = self.trainer.plan.length, {}
        for kind in ("code", "prose"):
            data = sets[f"held_{kind}"]
            windows, short = cut(data, t, WINDOWS, self.device), cut(data, 256, 4, self.device)
            far = cut(data, LONG * t, 12, self.device)
            self.trainer.experts(False)
            plain, best = self.score(windows)
            self.trainer.experts(True)
            packed, packed_best = self.score(windows)
            ends = [0, t // 2, t, 2 * t, 4 * t]
            by_position = self.score(far)[0].mean(0)
            result[kind] = dict(
                bf16=self.figures(windows, plain),
                int4=self.figures(windows, packed),
                top1_agreement=round(float((best == packed_best).float().mean()), 4),
                int4_by_position={
                    f"{a}-{b}": round(float(by_position[a:b].mean()), 4)
                    for a, b in zip(ends, ends[1:], strict=False)
                },
                check=dict(windows=short.tolist(), nats=float(self.score(short)[0].mean())),
            )
        return result

    @torch.no_grad()
    def continuations(self, prompts: Tensor, count: int, temperature: float) -> Tensor:
        random = torch.Generator(self.device).manual_seed(1)
        rows = prompts
        for _ in range(count):
            logits = self.logits(rows)[:, -1]
            if temperature > 0:
                noise = torch.rand(logits.shape, generator=random, device=self.device)
                logits = logits / temperature - torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-7)))
            rows = torch.cat((rows, logits.argmax(-1, keepdim=True)), 1)
        return rows[:, prompts.shape[1] :]

    def samples(
        self, sets: dict[str, np.ndarray], each: int, count: int
    ) -> tuple[dict, list[dict]]:
        """Share of continuations that loop (under half distinct 4-grams in their second half),
        and a few of them to read."""
        loops, shown = {}, []
        for kind in ("code", "prose"):
            prompts = document_starts(sets[f"held_{kind}"], 48, each, self.device)
            for temperature in (0.0, 0.7):
                told = self.continuations(prompts, count, temperature).tolist()
                distinct = [share_distinct(row[count // 2 :]) for row in told]
                loops[f"{kind} T={temperature}"] = dict(
                    looping=round(sum(d < 0.5 for d in distinct) / len(told), 3),
                    distinct4=round(sum(distinct) / len(told), 3),
                    prompts=len(told),
                )
                for prompt, row in list(zip(prompts.tolist(), told, strict=True))[:4]:
                    shown.append(
                        dict(
                            kind=kind,
                            temperature=temperature,
                            prompt=self.tokenizer.decode(prompt),
                            text=self.tokenizer.decode(row),
                        )
                    )
        return loops, shown


def cut(data: np.ndarray, length: int, most: int, device: torch.device) -> Tensor:
    """Up to `most` windows [length + 1] spread over the set."""
    count = max(1, min(most, (len(data) - 1) // length))
    starts = np.linspace(0, len(data) - 1 - length, count).astype(int)
    rows = [data[s : s + length + 1].astype(np.int64) for s in starts]
    return torch.from_numpy(np.stack(rows)).to(device)


def document_starts(data: np.ndarray, length: int, most: int, device: torch.device) -> Tensor:
    """The first tokens of documents (which begin with EOT), one row each."""
    starts = np.flatnonzero(data == 0)
    starts = starts[np.diff(np.append(starts, len(data))) > length][:most]
    rows = np.stack([data[s : s + length].astype(np.int64) for s in starts])
    return torch.from_numpy(rows).to(device)


def share_distinct(row: list[int]) -> float:
    grams = [tuple(row[i : i + 4]) for i in range(len(row) - 3)]
    return len(set(grams)) / len(grams)


def config(shape: Shape) -> dict:
    s = shape
    scheme = dict(
        num_bits=4,
        type="int",
        symmetric=True,
        strategy="group",
        group_size=32,
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


def packed(code: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """codes [out, groups, 32] and scales [out, groups, 1] as a checkpoint holds them."""
    shape = torch.tensor([code.shape[0], code[0].numel()], dtype=torch.int32)
    nibbles = (code.to(torch.int64) + 8).flatten(1).unflatten(1, (-1, 8))
    word = (nibbles << (4 * torch.arange(8))).sum(-1)
    word = torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)
    return dict(weight_packed=word, weight_scale=scale[..., 0].bfloat16(), weight_shape=shape)


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
        n: [x.cpu() for x in trainer.quantise(getattr(w, n).detach())]
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
    log |= dict(
        parameters=sum(p.numel() for p in trainer.weights.parameters()),
        plan=asdict(trainer.plan),
        run=asdict(trainer.run),
        torch=torch.__version__,
        python=platform.python_version(),
        device=device_name(trainer.device),
        bytes={p.name: p.stat().st_size for p in sorted(out.iterdir())},
    )
    write(out / "train_log.json", log)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
