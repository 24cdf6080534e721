"""`kdtree bench --shape`: slices with random weights: the command, its errors, the weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from says import says
from slice_case import TINY, made

from kdtree import CapacityError, ConfigError, cache, cli, ops
from kdtree.cli import machine, slices
from kdtree.cli.slices import model
from kdtree.config import from_hf, load
from kdtree.config.shapes import shape
from kdtree.weights.random import RandomWeights

DATA = Path(__file__).parent / "data"
PEAKS = machine.Peaks(bandwidth=1e9, peak=1e11)


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def peaks(monkeypatch):
    monkeypatch.setattr(machine, "peaks", lambda device: PEAKS)


def run(capsys, *arguments):
    code = cli.main(["bench", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name, path", [("kimi-k2.6", "kimi-k2.6"), ("deepseek-v3", "deepseek-v3")])
def test_known_shapes_are_the_published_ones(name, path):
    """In all that a slice depends on."""
    want = load(DATA / path)
    elsewhere = {"eos_ids": (), "prefix": "", "vision": (), "mtp_layers": 0}
    assert shape(name) == replace(want, **elsewhere)


def test_a_slice_prints_and_writes(tiny, peaks, device, capsys, tmp_path):
    out = tmp_path / "out.json"
    flags = "--layers 3 --context 70 --nodes 8,1 --dtype float32 --device".split()
    code, text, err = run(capsys, "--shape", tiny, *flags, device, "--json", out)
    assert (code, err) == (0, "")
    found = json.loads(out.read_text())
    assert (found["layers"], found["dense_layers"], found["context"]) == (3, 1, 70)
    assert (found["weights"], found["dtype"], found["bandwidth"]) == ("random-int4", "float32", 1e9)
    assert [row["nodes"] for row in found["rows"]] == [1, 8]
    for row in found["rows"]:
        names = [part["name"] for part in row["parts"]]
        assert names == ["rest", "dense layer", "MoE layer", "head"]
        counts = {"rest": 1, "dense layer": 1, "MoE layer": 2, "head": 1}
        whole = sum(counts[part["name"]] * part["us"] for part in row["parts"])
        assert whole == pytest.approx(row["forward_us"])
        assert len(row["experts_by_layer"]) == 2 and row["eager_us"] > 0
        moe = row["parts"][2]
        assert moe["ratio"] == pytest.approx(moe["us"] / moe["floor_us"]) or moe["us"] <= 0
        traced = [part["launches"] is not None for part in row["parts"]]
        assert all(traced) or not any(traced)
        assert device.type == "cuda" or "not measured" in text
    assert found["rows"][0]["experts"] == 2  # one node, two experts
    assert 2 < found["rows"][1]["experts"] <= 16
    assert "MoE layer, us" in text and "dense layer, us" in text and "\x1b" not in text


def test_a_slice_of_one_layer_has_no_experts(tiny, peaks, capsys):
    code, text, err = run(capsys, "--shape", tiny, *"--layers 1 --nodes 2 --device cpu".split())
    assert (code, err) == (0, "") and "MoE layer, us" not in text and "dense layer, us" in text


def test_slices_are_one_dense_layer_and_experts():
    kimi, deepseek = shape("kimi-k2.6"), shape("deepseek-v3")
    for config in kimi, deepseek:
        five = model.cut(config, 5)
        assert [five.is_moe(i) for i in range(five.layers)] == [False] + 4 * [True]
        assert model.cut(config, 1).moe is None
    assert model.cut(deepseek, 59).layers == 59
    with says(ValueError, "layers is 60", "at most 59", "1 dense and 58 with experts"):
        model.cut(deepseek, 60)
    every = replace(kimi, moe=replace(kimi.moe, first_layer=0))
    assert [model.cut(every, 2).is_moe(i) for i in range(2)] == [True, True]


@torch.no_grad()
def test_a_shorter_model_is_whole_again():
    slice_ = made(layers=3)
    tree = slice_.trees(4)[0]
    want = slice_.forward(tree, 0)
    with pytest.raises(KeyError), slice_.first(1):
        assert len(slice_.model.layers) == 1
        assert not torch.equal(slice_.forward(tree, 0), want)
        raise KeyError
    assert torch.equal(slice_.forward(tree, 0), want)


@torch.no_grad()
@pytest.mark.parametrize("weights", model.WEIGHTS)
def test_activations_keep_their_size(weights, device):
    slice_ = made(layers=6, weights=weights, device=device)
    for b, tree in enumerate(slice_.trees(64)):
        assert tree.token.shape == (1, 64) and (tree.depth <= 15).all()
        logits = slice_.forward(tree, b)
        assert logits.shape == (1, 64, 512) and 0.3 < logits.std() < 3


def test_random_weights_are_the_seed_s(device):
    def bank(seed):
        return RandomWeights(device, torch.float32, "int4", seed).take_int4_bank("ab", 64, 96)

    codes, scale = bank(3)
    assert codes.shape == (2, 2, 3, 128) and scale.shape == (2, 2, 3, 32)
    nibbles = torch.cat([(codes >> 4 * j) & 15 for j in range(8)]).flatten()
    counts = nibbles.bincount(minlength=16)
    assert (counts > 0.7 * counts.sum() / 16).all()  # the top bit of a word as often as any
    assert all(map(torch.equal, bank(3), (codes, scale)))
    assert not torch.equal(bank(4)[0], codes)


def test_int4_codes_have_no_mean_that_adds_up(device):
    """It would make all rows alike, and routing with them, within a few layers of full size."""
    made = RandomWeights(device, torch.float32, "int4", 1).take_int4_bank("a", 256, 4096)
    sums = ops.int4_linear(torch.ones(1, 4096, device=device), *(x[0] for x in made))
    assert abs(sums.mean()) < 0.5 and 0.8 < sums.std() < 1.3


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--layers 0", "layers is 0, wants 1 to 6"),
        ("--layers 7", "layers is 7, wants 1 to 6"),
        ("--nodes 1,65", "nodes is '1,65', wants numbers of 1 to 64"),
        ("--nodes 0", "wants numbers of 1 to 64"),
        ("--context 0", "context is 0, wants at least 1"),
        ("--context 8177", "context is 8177 and a tree 16 deep, the model has 8192"),
        ("--model x", "--model is no option of a slice"),
        ("--drafter ngram", "--drafter is no option of a slice"),
        ("--quantize int4", "--quantize is no option of a slice"),
        ("--dtype float16", "dtype is 'float16'"),
    ],
)
def test_mistakes(tiny, capsys, flags, message):
    code, out, err = run(capsys, "--shape", tiny, "--device", "cpu", *flags.split())
    assert (code, out) == (2, "") and message in err


def test_unknown_shapes(capsys, tmp_path):
    code, out, err = run(capsys, "--shape", tmp_path / "none")
    assert (code, out) == (2, "") and "known: kimi-k2.6, deepseek-v3" in err
    with says(ConfigError, "has no config.json"):
        shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert shape(str(tmp_path)) == shape(str(tmp_path / "config.json")) == from_hf(TINY)


@pytest.mark.parametrize(
    "flag", ["--layers 3", "--weights random-int4", "--context 9", "--nodes 1"]
)
def test_options_of_a_slice_want_a_shape(capsys, flag):
    code, out, err = run(capsys, *flag.split())
    assert (code, out) == (2, "") and f"{flag.split()[0]} is an option of a slice" in err


def test_too_much_is_refused_before_anything_is_made(capsys, monkeypatch):
    monkeypatch.setattr(cache, "free_bytes", lambda device: 30 * 2**30)
    monkeypatch.setattr(torch.Tensor, "random_", lambda *a, **k: pytest.fail("made"))
    monkeypatch.setattr(torch.Tensor, "normal_", lambda *a, **k: pytest.fail("made"))
    flags = "--shape kimi-k2.6 --dtype bfloat16 --device cpu".split()
    code, out, err = run(capsys, *flags)
    assert (code, out) == (2, "")
    # 4 x 384 experts of 24.77 MB, 2 x 2.35 GB and the rest: 44.9 GB, latents, and 2.35 GB to join
    assert "a slice of 5 layers takes 44.1" in err and "30.00 GiB free" in err
    with says(CapacityError, "takes"):
        model.build(model.cut(shape("deepseek-v3"), 5), *ARGUMENTS)


ARGUMENTS = "random-bf16", 4096, torch.device("cpu"), torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA")
def test_no_cuda(tiny, capsys):
    code, out, err = run(capsys, "--shape", tiny, "--device", "cuda")
    assert (code, out) == (2, "") and "torch finds no CUDA device" in err


def test_defaults_are_the_issue_s():
    assert (slices.LAYERS, slices.CONTEXT, slices.NODES) == (5, 4096, "1,4,8,16,32,64")
