"""The DFlash drafter against the oracle: every block of a generation, whatever path led to it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dflash_watched import Watched, Watcher
from model_run import assert_near
from tolerance import model_limit
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from variants import golden, names, variant

from kdtree import DflashConfig, Engine, OracleConfig, SamplingParams
from kdtree.engine import PREFILL

DRAFTERS = names(drafters=True)
TEXTS = ("greedy", "sampled")
ONE = SamplingParams(max_tokens=1)


def text_of(name: str, text: str = "greedy") -> list[int]:
    want = golden(name)
    return want["prompt.ids"].tolist() + want[f"{text}.ids"].tolist()


def engine_of(name, device, dtype, watched, batch=1) -> Engine:
    engine = Engine(variant(name), drafter=watched, device=str(device), dtype=dtype,
                    budget=11, max_batch=batch, max_seq_len=100)  # fmt: skip
    # What is read without having been written shows.
    watched.made[0].drafter.cache.data.fill_(float("nan"))
    return engine


def generated(name, device, batch=2, accuracy=0.7, fault=None) -> Watcher:
    """Both of the oracle's texts, in float32, by trees that are right now and then."""
    prompt = golden(name)["prompt.ids"].tolist()
    truth = tuple(tuple(text_of(name, text)) for text in TEXTS)
    watched = Watched(DflashConfig(), OracleConfig(truth, accuracy, 3, 6, budget=11))
    engine = engine_of(name, device, "float32", watched, batch)
    if fault:
        fault(watched.made[0].drafter)
    greedy = SamplingParams(max_tokens=64, ignore_eos=True)
    seed = int(golden(name)["metadata"]["sample_seed"])
    got = engine.generate([prompt, prompt], [greedy, replace(greedy, temperature=1.0, seed=seed)])
    assert [tuple(r.prompt_token_ids + r.token_ids) for r in got] == list(truth)
    assert all(sum(n > 0 for n in r.metrics.histogram) > 3 for r in got), "paths of several lengths"
    return watched.made[0]


def prefilled(name, device, dtype, lengths: range, config=None) -> Watcher:
    """The first block after each of the greedy text's beginnings of these lengths."""
    watched = Watched(config or DflashConfig())
    engine = engine_of(name, device, dtype, watched)
    engine.generate([text_of(name)[:n] for n in lengths], ONE)
    return watched.made[0]


def compare(name: str, watcher: Watcher, dtype: torch.dtype, request=None, text="greedy") -> int:
    """The blocks of one completion, or of all, against the oracle's; returns how many."""
    want, blocks = golden(name, "drafter"), watcher.by_length(request)
    first = len(golden(name)["prompt.ids"]) - 1
    layers = watcher.drafter.setup.target.layers + len(watcher.drafter.model.layers)
    limit = model_limit(dtype, layers)
    for length, kept in blocks.items():
        for key, got in zip(("hidden", "logits"), kept, strict=True):
            expected = want[f"{text}.{key}"][length - first]
            assert_near(f"{text} {length} {key}", got.numpy(), expected, limit)
    return len(blocks)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_blocks_match_float64(name, batch, device):
    watcher = generated(name, device, batch)
    for request, text in enumerate(TEXTS):
        assert compare(name, watcher, torch.float32, request, text) > 15


@pytest.mark.parametrize("name", [n for n in DRAFTERS if n != "dflash-int4"])
def test_blocks_in_bfloat16(name, device):
    """Of models without experts, whose choice bfloat16 would change."""
    watcher = prefilled(name, device, "bfloat16", range(24, 88, 7))
    assert compare(name, watcher, torch.bfloat16) == 10


@pytest.mark.parametrize("rows", [1, 5, 16, 64])
@pytest.mark.parametrize("name", ["dflash", "dflash-window"])
def test_chunks_of_the_prompt_change_nothing(name, rows, device, monkeypatch):
    monkeypatch.setitem(PREFILL, device.type, rows)
    watcher = prefilled(name, device, "float32", range(24, 88, 9))
    assert compare(name, watcher, torch.float32) == 8


def test_a_sequence_starts_anew(device):
    """Where a longer one has been before."""
    watched = Watched(DflashConfig())
    engine = engine_of("dflash", device, "float32", watched)
    engine.generate(text_of("dflash", "sampled")[:80], ONE)
    watched.made[0].rounds.clear()
    engine.generate(text_of("dflash")[:40], ONE)
    assert compare("dflash", watched.made[0], torch.float32) == 1


def mask_first(drafter):
    embed = drafter.model.embed
    drafter.model.embed = lambda token, *rest: embed(torch.full_like(token, 7), *rest)


def never_written(drafter):
    drafter.cache.write = lambda *args: None


def other_nodes(drafter):
    commit = drafter.commit

    def by_rank(path, taps):
        node = (
            torch.zeros_like(path.node) + torch.arange(path.node.shape[1], device=taps.device).int()
        )
        commit(replace(path, node=node), taps)

    drafter.commit = by_rank


def chunks_from_zero(drafter):
    drafter._start = lambda: torch.zeros_like(drafter.cache.length)


FAULTS = {
    "a wrong layer": lambda drafter: setattr(drafter, "taps", (1, 2)),
    "a mask in slot 0": mask_first,
    "stale features": never_written,
    "features of other nodes": other_nodes,
    "chunks from position 0": chunks_from_zero,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_noticed(fault, device):
    """What the comparison is for: each of these changes blocks and no token that is emitted."""
    watcher = generated("dflash", device, fault=fault)
    with pytest.raises(AssertionError, match="off by|not finite"):
        compare("dflash", watcher, torch.float32, 0)


@pytest.mark.parametrize("window", [2, 9, 30, 64, 90])
def test_window_leaves_out_what_is_farther(window, device):
    """And reserves no more; a window that holds the whole context and block changes no bit."""
    wide = prefilled("dflash", device, "float32", range(40, 41)).by_length()[39]
    config = DflashConfig(window=window)
    narrow = prefilled("dflash", device, "float32", range(40, 41), config)
    block = narrow.by_length()[39]
    same = all(torch.equal(a, b) for a, b in zip(wide, block, strict=True))
    assert same == (window >= 39 + 8)
    assert narrow.drafter.cache.rows == [min(window, 116)] * 2


def test_yarn_amplitude(device):
    """The legacy one is 0.1 ln(factor) + 1, that of the checkpoint its two mscales' ratio."""
    tables = {}
    for amplitude in ("config", "legacy"):
        config = DflashConfig(yarn_amplitude=amplitude)
        tables[amplitude] = prefilled("dflash-yarn", device, "float32", range(0), config).drafter
    ratio = tables["legacy"].model.rope[0, 0] / tables["config"].model.rope[0, 0]
    assert ratio.item() == pytest.approx(0.1 * 0.6 * math.log(8) + 1)


@pytest.mark.parametrize("name", ["dflash", "dflash-yarn"])
def test_transformers_drafter_agrees_with_the_oracle(name):
    """Its implementation of the same architecture, under other names, in float32."""
    want, taps = golden(name), {"dflash": (0, 2), "dflash-yarn": (1,)}[name]
    drafter = prefilled(name, "cpu", "float32", range(0)).drafter
    c, model = drafter.model.c, drafter.model
    yarn = c.rotary.yarn
    rope = {"rope_type": "default", "rope_theta": c.rotary.theta}
    if yarn:
        rope |= {"rope_type": "yarn", "factor": yarn.factor, "beta_fast": yarn.beta_fast,
                 "beta_slow": yarn.beta_slow, "mscale": yarn.mscale,
                 "mscale_all_dim": yarn.mscale_all_dim,
                 "original_max_position_embeddings": yarn.original}  # fmt: skip
    config = MuseGlimmerAssistantConfig(
        hidden_size=c.hidden, intermediate_size=c.width, num_hidden_layers=len(c.attention),
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head,
        rms_norm_eps=c.norm_eps, layer_types=["full_attention"] * len(c.attention),
        block_size=c.block, mask_token_id=c.mask, target_layer_ids=list(taps), rope_parameters=rope,
        max_position_embeddings=512,
    )  # fmt: skip
    theirs = MuseGlimmerAssistantModel(config).eval()
    theirs.load_state_dict(their_weights(model), strict=True)
    known = torch.tensor(want["prompt.ids"])[None]
    length = torch.tensor([known.shape[1]], dtype=torch.int32)
    embedded = model.embed(known, length, drafter.embedding.float(), drafter.mask)
    context = np.concatenate([want[f"layers.{i}.after_mlp"][:-1] for i in taps], 1)
    with torch.no_grad():
        out = theirs(
            noise_embeds=embedded, context_hidden_states=torch.tensor(context)[None].float()
        )
    expected = golden(name, "drafter")["greedy.hidden"][0]
    limit = model_limit(torch.float32, len(c.attention))
    assert_near(name, out.last_hidden_state[0, 1:].double().numpy(), expected, limit)


def their_weights(model) -> dict[str, torch.Tensor]:
    """Our drafter's weights by transformers' names."""
    found = {}
    for name, w in model.state_dict().items():
        if name in ("kv_proj.weight", "k_norm"):  # of all layers, once more
            continue
        w = w.float()
        if name.endswith("self_attn.qkv_proj.weight"):
            c = model.c
            heads = [n * c.head for n in (c.heads, c.kv_heads, c.kv_heads)]
            parts = (name.replace("qkv_", f"{x}_") for x in "qkv")
            found |= zip(parts, w.split(heads), strict=True)
        elif name.endswith("gate_up_proj.weight"):
            parts = (name.replace("gate_up", x) for x in ("gate", "up"))
            found |= zip(parts, w.chunk(2), strict=True)
        else:
            name = name.replace("hidden_norm", "encoder.output_norm_enc").replace(
                "fc.", "encoder.fc."
            )
            norm = name.endswith(("q_norm", "k_norm"))
            found[f"{name}.weight" if norm else name] = w
    return found
