"""DFlash checkpoints: what is read, what is refused by name, and when."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafters import setup
from variants import variant

from kdtree import CapacityError, CheckpointError, ConfigError, DflashConfig, Engine
from kdtree.config import load
from kdtree.drafters.dflash.config import read


@pytest.fixture
def drafter(tmp_path):
    """A copy of the plain drafter, to be changed."""
    shutil.copytree(variant("dflash") / "drafter", tmp_path / "drafter")
    return tmp_path / "drafter"


def change(directory, inner=None, **keys) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | keys
    config["dflash_config"] |= inner or {}
    path.write_text(json.dumps(config))


def engine(drafter, model="dflash", **options) -> Engine:
    options = {"device": "cpu", "max_seq_len": 64} | options
    return Engine(variant(model), drafter=DflashConfig(drafter), **{"budget": 7} | options)


@pytest.mark.parametrize(
    "inner, keys, message",
    [
        ({}, {"architectures": ["DSparkDraftModel"]}, "supported: DFlashDraftModel, DFlash2Draft"),
        ({}, {"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: 'silu'"),
        ({}, {"attention_bias": True}, "attention_bias is True, supported: False"),
        ({}, {"attention_sink_bias": True}, "unsupported keys: attention_sink_bias"),
        ({"causal_head": True}, {}, "causal_head is True, supported: False"),
        ({"projector_type": "domino"}, {}, "dflash_config has unsupported keys: projector_type"),
        ({"attention_mode": "mla"}, {}, "dflash_config has unsupported keys: attention_mode"),
        ({"use_swa": True}, {}, "dflash_config has unsupported keys: use_swa"),
        ({}, {"layer_types": ["linear_attention"] * 2}, "supported: full_attention, sliding"),
        ({}, {"layer_types": ["full_attention"]}, "wants 2 entries"),
        ({}, {"layer_types": ["sliding_attention"] * 2}, "has no 'sliding_window'"),
        ({}, {"block_size": 17}, "block_size is 17, wants at most 16"),
        ({}, {"block_size": 1}, "block_size is 1, wants an integer of at least 2"),
        ({"block_size": 4}, {}, "dflash_config.block_size is 4 where block_size is 8"),
        ({"target_layer_ids": []}, {}, r"target_layer_ids is \[\], wants layers in ascending"),
        ({"target_layer_ids": [2, 0]}, {}, r"target_layer_ids is \[2, 0\], wants layers in asc"),
        ({"target_layer_ids": [0, 3]}, {}, "holds 3, the model has 3 layers"),
        ({"mask_token_id": 512}, {}, "mask_token_id is 512, the vocabulary has 512"),
        ({"conv_kernel_size": 2, "conv_group_size": 24}, {}, "wants a divisor of hidden_size"),
        ({}, {"hidden_size": 64}, "the drafter's hidden_size is 64, the model's 128"),
        ({}, {"vocab_size": 500}, "the drafter's vocab_size is 500, the model's 512"),
        ({}, {"num_target_layers": 4}, "num_target_layers is 4 where the model's .* is 3"),
        ({}, {"num_key_value_heads": 4}, "num_attention_heads is 6, num_key_value_heads 4"),
        ({}, {"rope_scaling": {"type": "llama3"}}, "rope_type is 'llama3', supported"),
        ({}, {"quantization_config": {"quant_method": "awq"}}, "'awq' None is not supported"),
    ],
)
def test_refuses_by_name(inner, keys, message, drafter):
    change(drafter, inner, **keys)
    (drafter / "model.safetensors").unlink()  # the config is judged first
    with pytest.raises(ConfigError, match=message):
        engine(drafter)


def test_no_drafter():
    with pytest.raises(ConfigError, match="base/drafter is not a directory: dflash wants"):
        Engine(variant("base"), drafter="dflash", device="cpu")
    with pytest.raises(ConfigError, match="has no config.json: it is not a drafter directory"):
        engine(variant("dflash") / "..")


@pytest.mark.parametrize(
    "config, error, message",
    [
        (DflashConfig(window=1), ValueError, "window is 1, wants at least 2"),
        (DflashConfig(window=2.5), TypeError, "window is 2.5, wants an integer"),
        (DflashConfig(budget=64), ValueError, "budget is 64, wants 0 to 63"),
        (DflashConfig(yarn_amplitude="own"), ValueError, "wants 'config' or 'legacy'"),
        (DflashConfig(model=3), TypeError, "model is 3, wants a drafter's directory"),
    ],
)
def test_refuses_options(config, error, message, device):
    with pytest.raises(error, match=message):
        config.create(setup(device))


def test_tensors_are_named(drafter):
    """Missing, unused and mis-shaped ones, before the model's own weights are read."""
    path = drafter / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"] = tensors.pop("layers.1.self_attn.k_norm.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, 1:].contiguous()
    save_file(tensors, path)
    read_so_far = []
    with pytest.raises(CheckpointError) as error:
        engine(drafter, progress=lambda done, all: read_so_far.append(done))
    for part in ("d2t is not used by the model", "layers.1.self_attn.k_norm.weight is missing",
                 "fc.weight has shape [128, 255], wants [128, 256]"):  # fmt: skip
        assert part in str(error.value)
    assert not read_so_far


def test_names_may_have_a_prefix(drafter):
    path = drafter / "model.safetensors"
    plain = engine(drafter).drafter.model.state_dict()
    save_file({f"model.{name}": w for name, w in load_file(path).items()}, path)
    prefixed = engine(drafter).drafter.model.state_dict()
    assert plain.keys() == prefixed.keys()
    assert all(torch.equal(w, prefixed[name]) for name, w in plain.items())


def test_own_tensors_are_kept():
    built = engine(variant("dflash-window") / "drafter", "dflash-window")
    model, tensors = (
        built.drafter.model,
        load_file(variant("dflash-window") / "drafter/model.safetensors"),
    )
    assert torch.equal(model.embed_tokens, tensors["embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(model.mask_embedding, tensors["mask_embedding"].float())
    shared = engine(variant("dflash") / "drafter")
    assert shared.drafter.model.embed_tokens is shared.drafter.model.lm_head is None
    assert shared.drafter.embedding is shared.model.embed_tokens


def test_published_keys():
    """A DFlash2 config and scores: what becomes of them."""
    directory = variant("dflash2")
    c = read(directory / "drafter", load(directory))
    assert (c.convolution.taps, c.convolution.group) == (2, 16)
    assert (c.selector.rank, c.selector.candidates) == (24, 8)
    assert {(a.window, a.causal) for a in c.attention} == {(12, False)} and c.scores == {}
    built = engine(directory / "drafter", "dflash2")
    selector = built.drafter.model.selector
    assert selector.hidden_projection.weight.shape == (24, 128)
    assert selector.predecessor_codebook.shape == selector.successor_codebook.shape == (512, 24)


KIMI = {  # the keys and values of the published drafter of Kimi-K2.6
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "block_size": 8, "head_dim": 128, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "layer_types": ["full_attention"] * 6, "max_window_layers": 6,
    "max_position_embeddings": 262144, "model_type": "qwen3", "num_attention_heads": 64,
    "num_hidden_layers": 6, "num_key_value_heads": 8, "num_target_layers": 61,
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "sliding_window": None, "use_cache": True,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "dflash_config": {
        "mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58],
    },
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 163840,
}  # fmt: skip


def test_kimi_s_drafter(tmp_path, device):
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    target = load(Path(__file__).parent / "data/kimi-k2.6")
    there = replace(setup(device), target=target)
    found = {}
    for amplitude in ("config", "legacy"):
        config = DflashConfig(tmp_path, window=4096, yarn_amplitude=amplitude)
        found[amplitude] = c = config.architecture(tmp_path, there)
        assert (c.block, c.mask, c.taps) == (8, 163838, (1, 12, 24, 35, 47, 58))
        assert (c.heads, c.kv_heads, c.head, c.width) == (64, 8, 128, 18432)
        assert {(a.window, a.causal) for a in c.attention} == {(4096, False)}
    amplitudes = [c.rotary.yarn.amplitude for c in found.values()]
    assert amplitudes == pytest.approx([1.0, 1.4159], abs=1e-4)


def test_windows_are_causal_unless_the_checkpoint_says_not():
    directory = variant("dflash-window")
    c = read(directory / "drafter", load(directory))
    assert [(a.window, a.causal) for a in c.attention] == [(9, True), (0, False)]


def test_scores_are_passed_on(drafter):
    change(drafter, kdtree_scores={"a": [1.0] * 7})
    assert engine(drafter).drafter.model.c.scores == {"a": [1.0] * 7}


def test_a_mask_that_was_never_trained_is_said(drafter, caplog, tmp_path):
    """Of a model whose embedding of the mask is next to nothing."""
    built = engine(drafter)
    assert not caplog.records
    built.model.embed_tokens[7] *= 1e-3
    built.drafter.bind(built.model)
    assert "mask_token_id = 7" in caplog.text


@pytest.mark.parametrize("window", [None, 3, 40])
def test_no_two_rows_have_one_place(window, device):
    """Of many rows only the last of a ring stay; what does not stay is written nowhere."""
    directory = variant("dflash")
    c = DflashConfig(directory / "drafter", window).create(
        replace(setup(device, sequences=3), target=load(directory))
    )
    S, n, data = c.cache.rows[0], 50, c.cache.data
    start, kept = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([5, 70], [50, 2]))
    data.fill_(float("nan"))
    kv = torch.zeros(1, n, len(c.cache.rows), *data.shape[1:], device=device)
    kv[:, :, 0, 1, 0, 0] = torch.arange(n, device=device)  # so that rows are told apart
    for q, b in enumerate((2, 1)):
        where = b, start[q : q + 1], None, kept[q : q + 1]
        c.cache.write(kv, c.model.k_norm, c.model.rope, *where)
    held = {}
    for b, first in ((0, 0), (1, 70), (2, 5)):
        for at, i in enumerate(c.cache.layers[0][b, :, 1, 0, 0].tolist()):
            if i == i:
                held[b, at] = b, first + int(i)
                assert at == (first + int(i)) % S
    last = {(2, p) for p in range(max(5, 55 - S), 55)} | {(1, p) for p in (70, 71)}
    assert set(held.values()) == last


def test_memory_is_asked_for_before_it_is_taken(drafter, monkeypatch):
    monkeypatch.setattr("kdtree.cache.free_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match="the drafter's cache of 1 x 64 tokens takes"):
        engine(drafter)
