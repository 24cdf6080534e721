"""A thousand checkpoints spoilt at random: each loads right, or is refused by name.

Right is what the safetensors library reads from the same files, put together as the index says. No
other exception, no hang, no crash, no number that is not stored.
"""

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import torch
from alarm import within
from safetensors import safe_open
from spoilt import INDEX, MUTATIONS, Case

from kdtree import CheckpointError, ops
from kdtree.weights import Checkpoint, Reading, load
from kdtree.weights.formats import dequantize_fp8

CASES = 1000
SECONDS = 30  # of one case, far beyond what it takes


def build(w):
    packed, scale = w.take_int4_bank(["w"], 32, 64)
    return {
        "norm": w.take("norm", 24),
        "bias": w.take("bias", 6),
        "packed": packed[0],
        "scale": scale[0],
        "bank": w.take_bank(["bank.0", "bank.1"], 4, 6),
        "half": w.take_matrix("half", 5, 6),
        "blocks": w.take_matrix("blocks", 130, 9),
    }


def expected(directory: Path) -> dict[str, torch.Tensor]:
    """What build gives, by the library; the index decides where a tensor is."""
    where = json.loads((directory / INDEX).read_bytes())["weight_map"]
    stored = {}
    for name, shard in where.items():
        with safe_open(directory / shard, "pt", backend="pread") as f:
            stored[name] = f.get_tensor(name)
    packed, scale = ops.int4_pack(stored["w.weight_packed"], stored["w.weight_scale"].float())
    return {
        "norm": stored["norm"].float(),
        "bias": stored["bias"].float(),
        "packed": packed,
        "scale": scale,
        "bank": torch.stack([stored["bank.0"], stored["bank.1"]]).float(),
        "half": stored["half"]
        if stored["half"].dtype == torch.bfloat16
        else stored["half"].float(),
        "blocks": dequantized(stored["blocks"], stored.get("blocks_scale_inv")),
    }


def dequantized(w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if w.dtype != torch.float8_e4m3fn:
        return w if w.dtype == torch.bfloat16 else w.float()
    return dequantize_fp8(w, scale, torch.empty(w.shape))


def outcome(directory: Path) -> str:
    how = {"device": "cpu", "dtype": torch.float32, "reading": Reading(2, 64, 256)}
    try:
        got = load(Checkpoint(directory), build, **how)
    except CheckpointError as error:
        assert str(error).startswith(f"{directory}:\n  ")
        return "refused"
    want = expected(directory)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
        assert tensor.dtype == torch.int32 or tensor.isfinite().all(), name
    return "loaded"


def test_a_thousand_spoilt_checkpoints(tmp_path):
    seen = Counter()
    for number in range(CASES):
        mutation = MUTATIONS[number % len(MUTATIONS)]
        directory = tmp_path / str(number)
        directory.mkdir()
        case = Case(random.Random(number))
        mutation(case)
        case.write(directory)
        try:
            with within(SECONDS):
                seen[mutation.__name__, outcome(directory)] += 1
        except BaseException as error:
            raise AssertionError(f"case {number}, {mutation.__name__}: {error!r}") from error
        shutil.rmtree(directory)
    # The test is worth something only if both happen, where they can.
    each = CASES // len(MUTATIONS)
    assert seen["harmless", "loaded"] >= each
    for name in ("data_bytes", "swapped", "same_width"):
        assert seen[name, "loaded"] > 0, name
    for mutation in MUTATIONS[1:]:
        assert seen[mutation.__name__, "refused"] > 0, mutation.__name__
    assert sum(n for (_, result), n in seen.items() if result == "refused") > CASES / 2
