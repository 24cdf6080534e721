"""A trained drafter's files, in the layout of published DFlash checkpoints.

The matrices of its layers and of its features are INT4, group 32, as compressed-tensors packs
them; norms and the selector are bfloat16. `kdtree_scores` in the config holds the fitted numbers.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from demo_training.drafter_model import DraftShape
from demo_training.drafter_scores import Law
from demo_training.drafter_train import DraftTrainer
from demo_training.quantize import packed
from demo_training.save import facts, write

LAYER = {  # a checkpoint's names of a layer's matrices and norms
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}


def scores(law: Law) -> dict[str, list[float]]:
    return {n: [round(x, 4) for x in getattr(law, n).tolist()] for n in Law.__dataclass_fields__}


def config(shape: DraftShape, target: dict, law: Law | None) -> dict:
    """target: the target's config; law: None where nothing was fitted"""
    s = shape
    fitted = {} if law is None else dict(kdtree_scores=scores(law))
    return (
        dict(
            architectures=["DFlashDraftModel"],
            model_type="qwen3",
            torch_dtype="bfloat16",
            block_size=s.block,
            dflash_config=dict(
                mask_token_id=s.mask,
                target_layer_ids=list(s.taps),
                selector_rank=s.rank,
                selector_top_k=s.candidates,
            ),
            num_target_layers=target["num_hidden_layers"],
            num_hidden_layers=s.layers,
            hidden_size=s.hidden,
            intermediate_size=s.width,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            head_dim=s.head,
            hidden_act="silu",
            layer_types=["full_attention"] * s.layers,
            use_sliding_window=False,
            sliding_window=None,
            rope_theta=s.theta,
            rope_scaling=None,
            rms_norm_eps=s.eps,
            max_position_embeddings=target["max_position_embeddings"],
            vocab_size=s.words,
            attention_bias=False,
            attention_dropout=0.0,
            tie_word_embeddings=False,
        )
        | fitted
    )


@torch.no_grad()
def tensors(trainer: DraftTrainer) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name, on the CPU."""
    w = trainer.weights
    state = {
        "norm.weight": w.norm,
        "hidden_norm.weight": w.hidden_norm,
        "candidate_selector.hidden_projection.weight": w.project,
        "candidate_selector.predecessor_codebook": w.before,
        "candidate_selector.successor_codebook": w.after,
    }
    coded = {n: [x.cpu() for x in trainer.quantize(getattr(w, n).detach())] for n in trainer.low}
    matrices = {"fc": ("fc", 0)}
    for i in range(w.shape.layers):
        for name, own in LAYER.items():
            if own in coded:
                matrices[f"layers.{i}.{name}"] = own, i
            else:
                state[f"layers.{i}.{name}.weight"] = getattr(w, own)[i]
    state = {n: x.detach().bfloat16().cpu() for n, x in state.items()}
    for name, (own, i) in matrices.items():
        for kind, tensor in packed(*(x[i] for x in coded[own])).items():
            state[f"{name}.{kind}"] = tensor
    return {n: x.contiguous().clone() for n, x in state.items()}


def save(out: Path, trainer: DraftTrainer, law: Law | None, log: dict) -> None:
    """Writes the checkpoint, three files; the log last, with the sizes of the rest."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "model.safetensors"
    save_file(tensors(trainer), file, metadata={"format": "pt"})
    file.chmod(0o644)
    write(out / "config.json", config(trainer.weights.shape, trainer.target.config, law))
    log |= facts(trainer, [out / "config.json", file])
    write(out / "train_log.json", log)
