"""Numbers of a checkpoint that cannot be a model's: not finite, too large, scales that are none."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from says import says
from variants import variant

from kdtree import CheckpointError
from kdtree.models import load_model
from kdtree.weights import Checkpoint, Reading, load
from kdtree.weights.numbers import NOT_FINITE, NOT_POSITIVE, Rule, fault

FILE = "model.safetensors"
FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16, FP8]
BF16 = torch.finfo(torch.bfloat16).max
CPU = {"device": "cpu", "dtype": torch.float32}


def faults(directory, build, **how) -> list[str]:
    """What load says of a checkpoint, without the lines' indent."""
    with pytest.raises(CheckpointError) as error:
        load(Checkpoint(directory), build, **(CPU | how))
    return [line.strip() for line in str(error.value).splitlines()[1:]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pattern_that_is_not_finite(dtype):
    """All codes of 8 and 16 bits; of 32 those around each border, and random ones."""
    bits = torch.finfo(dtype).bits
    patterns = np.arange(2 ** min(bits, 16), dtype=np.int64)
    if bits == 32:
        edges = np.array([0, 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
        spread = np.random.default_rng(0).integers(0, 2**32, 1000)
        patterns = np.concatenate([edges, edges + 2**31, spread])
    data = patterns.astype(f"<u{bits // 8}")
    x = torch.from_numpy(data.view(f"<i{bits // 8}")).view(dtype)
    want = x.float().isfinite().tolist()
    found = [fault(one.view(np.uint8), dtype, Rule()) for one in data[:, None]]
    assert found == [None if finite else NOT_FINITE for finite in want]
    assert not all(want) and sum(want) > len(want) // 2


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 3, 4, 7, 8, 99])
def test_one_bad_number_among_many(tmp_path, at, bad):
    """Wherever in a piece it is."""
    x = torch.randn(100, generator=torch.Generator().manual_seed(4)).bfloat16()
    x[at] = bad
    save_file({"x": x}, tmp_path / FILE)
    with says(CheckpointError, "x is not finite"):
        load(Checkpoint(tmp_path), lambda w: w.take("x", 100), **CPU, reading=Reading(2, 8, 64))


def test_integers_are_finite():
    assert fault(np.full(64, 255, np.uint8), torch.int32, Rule(1, True)) is None


def test_names_all_that_are_not_finite(tmp_path, device):
    tensors = load_file(variant("int4") / FILE)
    scale = next(name for name in tensors if name.endswith("weight_scale"))
    bad = {"model.norm.weight": float("nan"), scale: float("inf"), "lm_head.weight": -float("inf")}
    for name, value in bad.items():
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[-1] = value
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_bytes((variant("int4") / "config.json").read_bytes())
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path, device=device, dtype=torch.float32)
    lines = str(error.value).splitlines()[1:]
    assert lines == [f"  {name} is not finite" for name in sorted(bad)]


def above(x: float) -> float:
    """The next float32."""
    return float(np.nextafter(np.float32(x), np.float32(np.inf)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most", [2.0, 448.0, 1.1])
def test_magnitudes_up_to_a_bound(dtype, most):
    """The numbers of each dtype that are next to the bound, of either sign."""
    bits = torch.finfo(dtype).bits
    integer = {32: torch.int32, 16: torch.int16, 8: torch.int8}[bits]
    nearest = torch.tensor([most], dtype=dtype).view(integer)
    for step in (-1, 0, 1):
        for sign in (0, torch.iinfo(integer).min):
            x = (nearest + step + sign).view(dtype)
            bad = not abs(x.item()) <= most
            found = fault(x.view(torch.uint8).numpy(), dtype, Rule(most))
            assert (found is not None) == bad, (x, found)


def test_signs():
    for value, bad in ((1.0, False), (1e-45, False), (0.0, True), (-0.0, True), (-1.0, True)):
        data = np.array([2.0, value], np.float32).view(np.uint8)
        assert fault(data, torch.float32, Rule(positive=True)) == (NOT_POSITIVE if bad else None)


@pytest.mark.parametrize("bank", [False, True])
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_scales_of_fp8(tmp_path, bank, quantize, device):
    """Every one that is 0, negative, not finite, or makes weights beyond the model's dtype."""
    bad = {"a": 0.0, "b": -1.0, "c": math.nan, "d": math.inf, "e": BF16 / 400, "f": -0.0}
    tensors = {}
    for name in "abcdefgh":
        scale = torch.full((2, 2), 0.5)
        scale[1, 0] = bad.get(name, BF16 / 448 if name == "g" else 1e-30)
        tensors |= {f"{name}.weight": torch.ones(160, 160).to(FP8)}
        tensors |= {f"{name}.weight_scale_inv": scale}
    save_file(tensors, tmp_path / FILE)

    def build(w):
        if bank and quantize:
            return w.take_int4_bank(list("abcdefgh"), 160, 160)
        if bank:
            return w.take_bank([f"{name}.weight" for name in "abcdefgh"], 160, 160)
        return [w.take_matrix(f"{name}.weight", 160, 160) for name in "abcdefgh"]

    how = {"device": device, "dtype": torch.bfloat16, "quantize": quantize}
    found = faults(tmp_path, build, **how)
    says_of = {name: line.partition(" ")[2] for name, line in zip("abcdef", found, strict=True)}
    assert [line.partition(" ")[0] for line in found] == [f"{n}.weight_scale_inv" for n in "abcdef"]
    assert says_of["a"] == says_of["b"] == says_of["f"] == "holds a scale of 0 or less"
    assert says_of["c"] == says_of["d"] == "is not finite"
    assert says_of["e"].startswith("holds a number beyond 7.566e+35, the most that")


def test_floats_beyond_bfloat16(tmp_path, device):
    """float32 that rounds to infinity is named; bfloat16's largest, and a float32 model, are not"""
    names = ["norm", "matrix", "bank.0", "bank.1", "e0.weight", "e1.weight"]
    tensors = {name: torch.ones(32, 32) for name in names}

    def build(w):
        return (
            w.take("norm", 32, 32),
            w.take_matrix("matrix", 32, 32),
            w.take_bank(["bank.0", "bank.1"], 32, 32),
            w.take_int4_bank(["e0", "e1"], 32, 32),
        )

    how = {"device": device, "dtype": torch.bfloat16, "quantize": "int4"}
    for tensor in tensors.values():
        tensor[3, 4], tensor[4, 3] = BF16, -BF16
    save_file(tensors, tmp_path / FILE)
    taken = load(Checkpoint(tmp_path), build, **how)
    assert all(tensor.isfinite().all() for tensor in taken[:3])
    for i, name in enumerate(names):
        tensors[name][3, 4] = (-1) ** i * above(BF16)
    save_file(tensors, tmp_path / FILE)
    found = faults(tmp_path, build, **how)
    assert [line.split()[0] for line in found] == sorted(names)
    assert all("holds a number beyond 3.39e+38" in line for line in found)
    kept = load(Checkpoint(tmp_path), build, **(how | {"dtype": torch.float32, "quantize": "int4"}))
    assert all(tensor.isfinite().all() for tensor in kept[:3])


@pytest.mark.parametrize("stored", DTYPES[:3])
@pytest.mark.parametrize(
    "scale, codes, wrong",
    [
        (0.0, False, None),  # a group of zeros, whatever its scale
        (0.0, True, "w.weight_scale is 0 where codes are not"),
        (-0.0, True, "w.weight_scale is 0 where codes are not"),
        (-0.5, True, None),  # a number like others
        (math.nan, True, "w.weight_scale is not finite"),
        (math.inf, False, "w.weight_scale is not finite"),
        (BF16, True, "w.weight_scale holds a number beyond 4.237e+37"),
    ],
)
def test_scales_of_int4(tmp_path, stored, scale, codes, wrong, device):
    if scale == BF16 and stored == torch.float16:
        pytest.skip("float16 has no such number")
    words = torch.full((32, 8), -0x77777778, dtype=torch.int32)
    words[5, 6] += codes  # in the second group of the row
    scales = torch.full((32, 2), 0.25).to(stored)
    scales[5, 1] = scale
    shape = torch.tensor([32, 64])
    tensors = {"w.weight_packed": words, "w.weight_scale": scales, "w.weight_shape": shape}
    save_file(tensors, tmp_path / FILE)

    def build(w):
        return w.take_int4_bank(["w"], 32, 64)

    how = {"device": device, "dtype": torch.bfloat16}
    if wrong is None:
        load(Checkpoint(tmp_path), build, **how)
    else:
        (found,) = faults(tmp_path, build, **how)
        assert found.startswith(wrong)


def test_stops_at_the_end_of_a_file(tmp_path):
    """All that is wrong with it is named, and nothing of the next is taken."""
    where = {}
    for shard in ("one", "two"):
        tensors = {f"{shard}.{i}": torch.ones(64) for i in range(8)}
        for i in (2, 5):
            tensors[f"{shard}.{i}"][63] = math.nan
        save_file(tensors, tmp_path / shard)
        where |= dict.fromkeys(tensors, shard)
    (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": where}))
    taken = []

    def build(w):
        for name in where:
            w.take(name, 64)
            taken.append(name)

    found = faults(tmp_path, build, reading=Reading(1, 256, 256))
    assert found[:2] == ["one.2 is not finite", "one.5 is not finite"]
    assert taken == [*where, *list(where)[:8]]  # once on the meta device
