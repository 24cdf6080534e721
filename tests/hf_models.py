"""Tiny checkpoints by code that is not ours, and what transformers makes of them in float64.

transformers builds and saves the models, compressed-tensors quantises and packs. The weights are
such that every term counts: scores, router and logits with a spread of one or more, latents so
small that the eps of their norms shows, norm weights and biases that are not all alike.
"""

import functools
import json
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from hf_cases import CASES, TINY, VISION, Case
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

PROMPT = 100  # tokens; YaRN's original lengths are less
FILE = "model.safetensors"
LATENT = 0.05  # sigma of the latents before their norms
SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32),
)


class Double(TorchFunctionMode):
    """Makes float64 of every float32 that the code inside asks for by name.

    A model in float64 of transformers still takes its angles, norms, scores and softmax in float32.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(value):
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widen, args), **{k: widen(v) for k, v in (kwargs or {}).items()})


@functools.cache
def root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@functools.cache
def checkpoint(name: str, dtype: str) -> Path:
    """The directory of a case's checkpoint, its weights stored in dtype."""
    out = Path(root().name) / f"{name}-{dtype}"
    case = CASES[name]
    model = build(case)
    fill(model, case)
    model.to(getattr(torch, dtype)).save_pretrained(out)
    if case.model == "Kimi_K25":
        rename_as_on_the_hub(out)
    shutil.copytree(out, readable(out))
    if case.saved_as:
        rewrite_config(out, model_type=case.saved_as)
    if case.int4:
        pack(out)
    return out


def readable(directory: Path) -> Path:
    """The same checkpoint in the form that transformers can load: unpacked, a model_type it has."""
    return directory.with_suffix(".readable")


def build(case: Case) -> nn.Module:
    config = TINY | case.change
    if case.model != "Kimi_K25":
        config = getattr(transformers, f"{case.model}Config")(**config)
        return getattr(transformers, f"{case.model}ForCausalLM")(config)
    vision = {"vision_config": VISION, "projection_hidden_size": VISION["hidden_size"]}
    image = {"image_token_id": 10**6, "video_token_id": 10**6}  # no token of the text is one
    config = transformers.Kimi_K25Config(
        text_config=config | {"model_type": "deepseek_v3"},
        tie_word_embeddings=False,  # as on the hub; the class's own default is True
        **vision,
        **image,
    )
    return transformers.Kimi_K25ForConditionalGeneration(config)


@torch.no_grad()
def fill(model: nn.Module, case: Case) -> None:
    """Weights that depend on their own name and shape alone."""
    attention = text_layers(model)[0].self_attn
    scaling = attention.scaling * attention.qk_head_dim**0.5
    query = {"q_proj": 1.5 / scaling, "q_b_proj": 1.5 / scaling}
    rows = {"q_a_proj": None, "kv_a_proj_with_mqa": attention.kv_lora_rank}
    gains = query | {"o_proj": 1.9, "gate": 1.5, "gate_proj": 1.3, "down_proj": 1.1, "lm_head": 2.5}
    gains |= {"embed_tokens": case.embed}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        owner, _, kind = ("." + name).rpartition(".")
        owner = kind if kind != "weight" else owner.rpartition(".")[2]
        noise = torch.randn(tensor.shape, generator=generator)
        if "inv_freq" in kind:
            continue
        if kind == "e_score_correction_bias":
            noise = case.bias + 0.15 * noise
        elif tensor.ndim == 1:
            noise = 1 + 0.3 * noise
        else:
            noise *= gains.get(owner, 1.0)
            noise /= 1 if owner == "embed_tokens" else max(tensor.shape[-1], 1) ** 0.5
        if owner in rows:
            noise[: rows[owner]] *= LATENT
        tensor.copy_(noise)


def text_layers(model: nn.Module) -> nn.ModuleList:
    return getattr(model.model, "language_model", model.model).layers


def rename_as_on_the_hub(directory: Path) -> None:
    """Gives the tensors of a Kimi-K2.5 the names that the released ones have.

    When it saves, transformers names the text model's layers "blocks" and puts one norm under
    "model."; it can read both, but no checkpoint on the hub is like that.
    """
    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers.").removeprefix(
            "model."
        ): tensor
        for name, tensor in load_file(directory / FILE).items()
    }
    save_file(tensors, directory / FILE, {"format": "pt"})


def rewrite_config(directory: Path, **change) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def pack(directory: Path) -> None:
    """Routed experts to INT4, and in the readable form to what they are worth then."""
    packed, unpacked = {}, {}
    for name, tensor in load_file(directory / FILE).items():
        if ".experts." not in name:
            packed[name] = unpacked[name] = tensor
            continue
        groups = tensor.unflatten(1, (-1, 32))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME.weights)
        stored = {"weight": tensor, "weight_scale": scale.bfloat16()}
        stored = PackedQuantizationCompressor.compress(stored, SCHEME)
        packed |= {f"{name.removesuffix('weight')}{kind}": t for kind, t in stored.items()}
        exact = stored | {"weight_scale": stored["weight_scale"].float()}
        unpacked[name] = PackedQuantizationCompressor.decompress(exact, SCHEME)["weight"]
    save_file(unpacked, readable(directory) / FILE, {"format": "pt"})
    save_file(packed, directory / FILE, {"format": "pt"})
    quantization = QuantizationConfig(
        config_groups={"group_0": SCHEME},
        format="pack-quantized",
        quantization_status="compressed",
    )
    rewrite_config(directory, quantization_config=quantization.model_dump(mode="json"))


def load(directory: Path, dtype: torch.dtype) -> nn.Module:
    """A checkpoint as transformers loads it."""
    [kind] = json.loads((readable(directory) / "config.json").read_text())["architectures"]
    model, report = getattr(transformers, kind).from_pretrained(
        readable(directory),
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    return model


def prompt(name: str) -> np.ndarray:
    return np.random.default_rng(0).integers(0, (TINY | CASES[name].change)["vocab_size"], PROMPT)


@functools.cache
def golden(name: str, stored: str) -> dict[str, np.ndarray]:
    """Streams, routes and logits of the prompt in float64, by the names of gen_model_ref.py."""
    found = {}
    logits = exact_logits(checkpoint(name, stored), prompt(name), found)
    return found | {"prompt.ids": prompt(name), "prompt.logits": logits}


def exact_logits(
    directory: Path, ids: np.ndarray, found: dict | None = None, routes: dict | None = None
) -> np.ndarray:
    """Logits in float64. found: filled with streams and routes; routes: as in own_logits."""
    with Double():
        model = load(directory, torch.float64)
        if found is not None:
            watch(model, found)
        force(model, routes)
        return logits_of(model, ids)


@torch.no_grad()
def logits_of(model: nn.Module, ids: np.ndarray) -> np.ndarray:
    """float64 [len(ids), W]"""
    return model(torch.tensor(ids)[None]).logits[0].double().numpy()


def watch(model: nn.Module, found: dict) -> None:
    """Lets the model's forward fill found, by the names of gen_model_ref.py."""

    def keep(name: str, tensor: Tensor) -> None:
        found[name] = tensor.detach().numpy()

    def watch_layer(i: int, layer: nn.Module) -> None:
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda module, args: keep(f"layers.{i}.after_attention", args[0][0])
        )
        layer.register_forward_hook(lambda module, args, out: keep(f"layers.{i}.after_mlp", out[0]))
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda module, args, out: keep_route(i, module, *out)
            )

    def keep_route(i: int, gate: nn.Module, logits: Tensor, weights: Tensor, ids: Tensor) -> None:
        keep(f"layers.{i}.router.weights", weights)
        keep(f"layers.{i}.router.ids", ids)
        keep(f"layers.{i}.router.margin", margin(gate, logits, ids))

    for i, layer in enumerate(text_layers(model)):
        watch_layer(i, layer)


def margin(gate: nn.Module, logits: Tensor, ids: Tensor) -> Tensor:
    """How much the scores of the router's choice stand above those of what it left. [T]"""
    if hasattr(gate, "e_score_correction_bias"):
        scores, best = logits.sigmoid() + gate.e_score_correction_bias, 2
    else:
        scores, best = logits.softmax(-1), 1
    left = scores.scatter(1, ids, -torch.inf)
    least = scores.gather(1, ids).amin(1)
    gap = torch.full_like(least, torch.inf)
    if gate.num_group and getattr(gate, "topk_method", None) != "greedy":
        groups = scores.unflatten(1, (gate.num_group, -1))
        group = groups.topk(min(best, groups.shape[2]), 2).values.sum(2)
        ranked = group.sort(1, descending=True).values
        kept = group >= ranked[:, gate.topk_group - 1, None]
        left = (
            left.unflatten(1, groups.shape[1:]).masked_fill(~kept[..., None], -torch.inf).flatten(1)
        )
        if gate.topk_group < gate.num_group:
            gap = (ranked[:, gate.topk_group - 1] - ranked[:, gate.topk_group]) / best
    return torch.minimum(gap, least - left.amax(1))


def own_logits(name: str, stored: str, routes: dict | None = None) -> np.ndarray:
    """What transformers itself makes of the prompt in the stored dtype.

    routes: (ids, weights) by layer, to be used in place of its own
    """
    model = load(checkpoint(name, stored), getattr(torch, stored))
    force(model, routes)
    return logits_of(model, prompt(name))


def force(model: nn.Module, routes: dict | None) -> None:
    for i, (ids, weights) in (routes or {}).items():
        ids, weights = torch.tensor(ids).long(), torch.tensor(weights)
        text_layers(model)[i].mlp.gate.register_forward_hook(
            lambda module, args, out, ids=ids, weights=weights: (out[0], weights.to(out[1]), ids)
        )


def tokenizer(text: str) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE trained on the text."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
