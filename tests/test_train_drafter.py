"""The training of the demo's drafter: its forms against slow ones, and a toy's whole way."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from demo_training.check import Reader
from demo_training.drafter_model import DraftShape, DraftWeights, Pieces, edge, forward
from demo_training.drafter_noise import draw, gumbel
from demo_training.drafter_save import LAYER, save
from demo_training.drafter_target import Target
from demo_training.drafter_text import anchor_weights, looping, write
from demo_training.drafter_train import DraftPlan, DraftTrainer
from model_ref import philox
from safetensors.torch import load_file
from token_file import write_tokens

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "kdtree" / "demo"
SHAPE = DraftShape.small()
COMMAND = "drafter --device cpu --small --seconds 1 --within 60 --cohorts 1"

# Float32 forms that sum in another order agree to 4e-6 here; a routing tie may cost more.
FLOAT32 = 1e-4


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(DEMO, (3, 7), 128, torch.device("cpu"))


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A directory with the files of a toy drafter."""
    out = tmp_path_factory.mktemp("drafter")
    tokens = write_tokens(out / "tokens.xz", DEMO)
    # A process of its own: training sets torch's precision and a signal's handler.
    command = [sys.executable, "python/train_demo.py", *COMMAND.split(), "--model", str(DEMO)]
    command += ["--tokens", str(tokens), "--out", f"{out}/drafter"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    return out / "drafter"


def test_target_is_the_checkpoint_s(target):
    """Both forms of its forward give the logits of a reader that shares no code with it."""
    row = torch.arange(40) * 37 % 8192
    want = Reader(DEMO).logits(row)
    cache = target.cache(2, 40)
    seen = target.prefill(row[None, :30].expand(2, -1), cache)
    assert (target.logits(seen.last)[1] - want[:30]).abs().max() < FLOAT32
    for position in range(30, 40):
        seen = target.decode(row[position].expand(2), position, cache)
        assert (target.logits(seen.last)[0] - want[position]).abs().max() < FLOAT32
    whole = target.prefill(row[None])
    assert (whole.taps[0, -1] - seen.taps[1]).abs().max() < FLOAT32


def test_taps_are_the_stream_after_the_named_layers(target):
    every = Target(DEMO, tuple(range(8)), 128, torch.device("cpu"))
    row = torch.arange(20)[None]
    taps = every.prefill(row).taps.unflatten(-1, (8, -1))
    assert target.prefill(row).taps.equal(taps[..., [3, 7], :].flatten(-2))
    last = every.prefill(row).last
    again = F.rms_norm(taps[..., 7, :], (256,), every.norm, 1e-6)
    assert (last - again).abs().max() < FLOAT32


def test_noise_is_the_contract_s():
    for seed, position in ((0, 0), (2**40 + 7, 3), (5, 2**33 + 1)):
        got = gumbel(torch.tensor([seed]), torch.tensor([position]), 40)[0]
        want = philox.gumbel(seed, position, 40)
        assert np.abs(got.numpy() - want).max() < 1e-5  # float32 logarithms


def test_draw_is_the_sampler_s(rng):
    logits = torch.randn(6, 40, generator=rng) * 3
    logits[5] = 0.0  # ties go to the lower id
    t = torch.tensor([0.0, 0.5, 1.0, 0.7, 0.0, 0.0])
    seed, position = torch.arange(6), torch.arange(6) * 7
    score = torch.where(
        t[:, None] > 0,
        logits / t[:, None].clamp(min=0.1) + gumbel(seed, position, 40),
        logits,
    )
    assert draw(logits, t, seed, position).tolist() == score.argmax(1).tolist()


def test_text_is_the_target_s_own(target):
    prompts = torch.arange(24).view(2, 12)
    t, seed = torch.tensor([0.0, 1.0]), torch.tensor([1, 2])
    text = write(target, prompts, 20, t, seed)
    seen = target.prefill(text.tokens)
    logits = target.logits(seen.last)
    assert text.tokens[0, 12:].equal(logits[0, 11:-1].argmax(-1))
    for p in range(12, 20):
        noise = torch.from_numpy(philox.gumbel(2, p, 8192)).float()
        assert int(text.tokens[1, p]) == int((logits[1, p - 1] + noise).argmax())
    assert (text.taps[:, :-1] - seen.taps[:, :-1]).abs().max() < FLOAT32
    assert (text.last[:, :-1] - seen.last[:, :-1]).abs().max() < FLOAT32


def slow_block(w: DraftWeights, embed, token, taps, anchor: int):
    """One block of one sequence, one head at a time: [N - 1, D]. taps [T, .], as at inference."""
    s = w.shape

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + s.eps).rsqrt() * weight

    def turn(x, position):
        out = torch.empty_like(x)
        for i in range(s.head // 2):
            angle = torch.as_tensor(position).double() * s.theta ** (-2 * i / s.head)
            pair = torch.complex(x[:, i].double(), x[:, i + s.head // 2].double())
            pair = pair * torch.polar(torch.ones_like(angle), angle)
            out[:, i], out[:, i + s.head // 2] = pair.real.float(), pair.imag.float()
        return out

    far = norm(taps[:anchor] @ w.fc[0].T, w.hidden_norm)
    x = embed[torch.tensor([int(token), *[s.mask] * s.slots])]
    positions, own = torch.arange(anchor + s.block), torch.arange(anchor, anchor + s.block)
    for i in range(s.layers):
        y = norm(x, w.input_norm[i])
        both, heads = torch.cat((far, y)), []
        for h in range(s.heads):
            g, rows = h // (s.heads // s.kv_heads), slice(h * s.head, (h + 1) * s.head)
            part = slice(g * s.head, (g + 1) * s.head)
            q = turn(norm(y @ w.q[i, rows].T, w.q_norm[i]), own)
            k = turn(norm(both @ w.k[i, part].T, w.k_norm[i]), positions)
            heads.append((q @ k.T / math.sqrt(s.head)).softmax(-1) @ both @ w.v[i, part].T)
        x = x + torch.cat(heads, -1) @ w.o[i].T
        y = norm(x, w.post_norm[i])
        x = x + (F.silu(y @ w.gate[i].T) * (y @ w.up[i].T)) @ w.down[i].T
    return norm(x, w.norm)[1:]


@torch.no_grad()
def test_a_block_sees_what_it_will_see_at_inference(rng):
    """The batched form is the plain one, which is given no feature from the anchor on."""
    torch.manual_seed(0)
    w = DraftWeights(SHAPE)
    for name in ("input_norm", "post_norm", "q_norm", "k_norm", "norm", "hidden_norm"):
        getattr(w, name).uniform_(0.5, 1.5)
    low = {n: getattr(w, n) for n in ("fc", "q", "k", "v", "o", "gate", "up", "down")}
    embed = torch.randn(SHAPE.words, SHAPE.hidden, generator=rng)
    tokens = torch.randint(SHAPE.words, (2, 24), generator=rng)
    taps = torch.randn(2, 24, 512, generator=rng)
    anchor = torch.tensor([[1, 9, 9], [16, 5, 2]])
    got = forward(Pieces.make(False), w, low, embed, tokens, taps, anchor)
    for b in range(2):
        for a in range(3):
            s = int(anchor[b, a])
            want = slow_block(w, embed, tokens[b, s], taps[b], s)
            assert (got[b, a] - want).abs().max() < 1e-4, (b, a)


def test_loops_are_found_and_weigh_less(target):
    tokens = torch.arange(96).expand(2, -1).clone()
    tokens[1, 40:] = torch.arange(56) % 5
    found = looping(tokens)
    assert not found[0].any()
    assert int(found[1].nonzero()[0]) == 40 + 5 + 16 - 1 and found[1, 60:].all()
    text = write(target, tokens[:, :16], 20, torch.zeros(2), torch.arange(2))
    text.tokens, text.prompt = tokens, 16
    weight = anchor_weights(text, 7)
    assert weight[:, 0].eq(0).all() and weight[:, 96 - 7 :].eq(0).all()
    assert weight[0, 15:89].eq(1).all() and weight[1, 58:89].eq(0.15).all()
    assert weight[0, 1:15].eq(torch.tensor(0.1)).all()


def test_selector_s_edge_is_the_published_one(rng):
    w = DraftWeights(SHAPE)
    h, before, after = torch.randn(3, 256, generator=rng), torch.tensor([4, 5, 6]), 9
    got = edge(w, h, before) @ w.after[after]
    for i in range(3):
        p = w.project @ h[i]
        want = sum(w.before[before[i], k] * p[k] * w.after[after, k] for k in range(SHAPE.rank))
        assert torch.isclose(got[i], want, atol=1e-5)


def trainer_of(target: Target) -> DraftTrainer:
    torch.manual_seed(0)
    trainer = DraftTrainer(DraftPlan(seconds=1, compiled=False), DraftWeights(SHAPE), target)
    trainer.refresh(True)
    return trainer


def test_loss_is_against_the_target_s_distribution_of_the_slot_s_token(target):
    trainer = trainer_of(target)
    text = write(target, torch.arange(12)[None], 24, torch.ones(1), torch.tensor([3]))
    anchor = torch.tensor([[2, 5, 12, 9]])
    got = trainer.backward(text, anchor, True)
    p = target.logits(target.prefill(text.tokens).last[0]).softmax(-1)
    hidden, want = trainer.hidden(text, anchor).detach()[0], 0.0
    weight = torch.exp(-torch.arange(7) / 4.0)
    for a in range(4):
        for k in range(1, 8):  # the token at anchor + k follows the one before it
            logq = target.logits(hidden[a, k - 1]).log_softmax(-1)
            loss = -(p[anchor[0, a] + k - 1] * logq).sum()
            want += weight[k - 1] / weight.sum() * loss / 4
    assert abs(float(got) - float(want)) < 1e-3
    # the selector learns, on the first of four anchors, from the tokens before each slot's
    learnt = trainer.weights.before.grad.abs().sum(1).nonzero()[:, 0]
    assert set(learnt.tolist()) == set(text.tokens[0, 2:9].tolist())
    assert all(c.grad.abs().sum() > 0 for c in trainer.low.values())


def test_training_falls(target):
    trainer = trainer_of(target)
    text = write(target, torch.arange(12)[None], 24, torch.ones(1), torch.tensor([3]))
    anchor = torch.tensor([[2, 5, 12, 9]])
    trainer.run.steps = trainer.plan.warm_steps
    losses = [float(trainer.step(text, anchor, part)) for part in torch.linspace(0.3, 0.9, 12)]
    assert losses[-1] < losses[0] - 2


def test_saved_tensors_are_those_that_ran(target, tmp_path):
    trainer = trainer_of(target)
    save(tmp_path, trainer, None, {})
    reader = Reader.__new__(Reader)
    reader.t = load_file(tmp_path / "model.safetensors")
    assert "kdtree_scores" not in json.loads((tmp_path / "config.json").read_text())
    assert reader.weight("fc").equal(trainer.low["fc"][0].detach())
    for part, names in (("self_attn", "q k v o"), ("mlp", "gate up down")):
        for n in names.split():
            for i in range(SHAPE.layers):
                saved = reader.weight(f"layers.{i}.{part}.{n}_proj")
                assert saved.equal(trainer.low[n][i].detach()), n
    error = (reader.weight("fc") - trainer.weights.fc[0]).detach().square().mean().sqrt()
    assert error < 0.12 * trainer.weights.fc.std()
    after = reader.t["candidate_selector.successor_codebook"]
    assert after.equal(trainer.weights.after.detach().bfloat16())


def test_toy_has_its_files_and_figures(toy):
    log = json.loads((toy / "train_log.json").read_text())
    assert not log["run"]["failure"] and "failures" not in log
    curve = [row["loss"] for row in log["run"]["curve"]]
    assert curve and all(map(math.isfinite, curve))
    assert len(log["judged"]) == 6 and log["judged"]["code T=0.0"]["plain"]["tree 7"] >= 1
    assert sorted(p.name for p in toy.iterdir()) == [
        "config.json",
        "model.safetensors",
        "train_log.json",
    ]
    config = json.loads((toy / "config.json").read_text())
    scores = config["kdtree_scores"]
    assert set(scores) == {"a", "b", "c", "selector", "bigram"}
    assert all(len(row) == config["block_size"] - 1 for row in scores.values())
    assert config["dflash_config"]["target_layer_ids"] == [3, 7]


def test_toy_s_tensors_are_int4_as_published(toy):
    """Names, shapes and the packing, which check's own reader undoes."""
    config = json.loads((toy / "config.json").read_text())
    reader = Reader.__new__(Reader)
    reader.t = load_file(toy / "model.safetensors")
    d, width, head = 256, config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = dict(q=(q, d), k=(kv, d), v=(kv, d), o=(d, q), gate=(width, d), up=(width, d))
    shapes |= dict(down=(d, width), input_norm=(d,), post_norm=(d,), q_norm=(head,), k_norm=(head,))
    names = {"fc": (d, 2 * d), "norm": (d,), "hidden_norm": (d,)}
    for i in range(config["num_hidden_layers"]):
        names |= {f"layers.{i}.{name}": shapes[own] for name, own in LAYER.items()}
    names["candidate_selector.hidden_projection"] = 8, d
    for name, shape in names.items():
        assert tuple(reader.weight(name).shape) == shape, name
        packed = len(shape) == 2 and "selector" not in name
        assert (f"{name}.weight_packed" in reader.t) == packed, name
    for name in ("predecessor_codebook", "successor_codebook"):
        assert reader.t[f"candidate_selector.{name}"].shape == (8192, 8)
    stems = {n.rsplit(".weight", 1)[0] for n in reader.t}
    assert stems - set(names) == {
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
    }
