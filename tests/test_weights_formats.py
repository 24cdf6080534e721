"""Number formats: FP8 blocks, INT4 as stored or made at load, float16."""

import numpy as np
import pytest
import torch
from int4 import values, words
from model_ref import checkpoint as oracle
from safetensors.torch import load_file, save_file
from says import says
from variants import variant

from kdtree import CheckpointError, Engine, SamplingParams, ops
from kdtree.models import load_model
from kdtree.weights import Checkpoint, load
from kdtree.weights.formats import dequantize_fp8, quantize_int4

FILE = "model.safetensors"
FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16, FP8]


def random_fp8(rows: int, columns: int) -> torch.Tensor:
    codes = np.random.default_rng(0).integers(0, 256, (rows, columns), np.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    return torch.from_numpy(codes).view(FP8)


def block_by_block(w: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """float64, by the oracle's own decoding."""
    w, scale = oracle.from_e4m3(w.view(torch.uint8).numpy()), scale.double().numpy()
    return np.array(
        [[x * scale[i // 128, j // 128] for j, x in enumerate(row)] for i, row in enumerate(w)]
    )


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (192, 200), (129, 300), (2200, 130)])
def test_fp8_blocks(shape, device):
    w = random_fp8(*shape)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) * 1e-3
    exact = block_by_block(w, scale)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(shape, dtype=dtype, device=device)
        got = dequantize_fp8(w.to(device), scale.to(device), out).cpu()
        want = torch.from_numpy(exact.astype(np.float32))  # one rounding of an exact product
        if dtype == torch.bfloat16:
            bits = oracle.to_bf16(want.numpy()).view(np.int16)
            want = torch.from_numpy(bits).view(torch.bfloat16)
        assert torch.equal(got, want)


def test_fp8_of_the_checkpoint(tmp_path, device):
    """Matrices, banks and what does not fit: a scale that is missing, mis-shaped or of no use."""
    w, scale = random_fp8(192, 200), torch.rand(2, 2)
    tensors = {"m.weight": w, "m.weight_scale_inv": scale}
    save_file(tensors, tmp_path / FILE)
    want = torch.from_numpy(block_by_block(w, scale)).float()

    def build(w):
        return w.take_matrix("m.weight", 192, 200)

    how = {"device": device, "dtype": torch.float32}
    assert torch.equal(load(Checkpoint(tmp_path), build, **how).cpu(), want)
    bank = load(Checkpoint(tmp_path), lambda w: w.take_bank(["m.weight"], 192, 200), **how)
    assert torch.equal(bank[0].cpu(), want)
    for name, tensor, message in (
        ("m.weight_scale_inv", None, "m.weight_scale_inv is missing"),
        ("m.weight_scale_inv", scale[:1], "m.weight_scale_inv has shape [1, 2], wants [2, 2]"),
        ("m.weight_scale_inv", scale.half(), "m.weight_scale_inv has dtype float16, wants float32"),
        ("m.weight", want, "m.weight_scale_inv is not used by the model"),
    ):
        changed = {
            k: v.contiguous() for k, v in (tensors | {name: tensor}).items() if v is not None
        }
        save_file(changed, tmp_path / FILE)
        with says(CheckpointError, message):
            load(Checkpoint(tmp_path), build, **how)


def test_a_norm_is_no_fp8(tmp_path):
    save_file({"norm": torch.zeros(4).to(FP8)}, tmp_path / FILE)
    with says(CheckpointError, "norm has dtype float8_e4m3fn, wants float32, bfloat16, float16"):
        load(Checkpoint(tmp_path), lambda w: w.take("norm", 4), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", DTYPES[:3])
def test_floats_become_the_model_s(tmp_path, stored, wanted, device):
    x = torch.randn(33, 40, generator=torch.Generator().manual_seed(1)).to(stored)
    save_file({f"{name}{i}": x + i for name in "tmb" for i in range(2)}, tmp_path / FILE)

    def build(w):
        both = [[take(f"{name}{i}", 33, 40) for i in range(2)] for name, take in takes(w)]
        return [*map(torch.stack, both), w.take_bank(["b0", "b1"], 33, 40)]

    def takes(w):
        return ("t", w.take), ("m", w.take_matrix)

    want = torch.stack([x, x + 1])
    taken, matrices, bank = load(Checkpoint(tmp_path), build, device=device, dtype=wanted)
    assert torch.equal(taken.cpu(), want.to(wanted)) and torch.equal(bank.cpu(), want.to(wanted))
    kept = stored == torch.bfloat16  # the same numbers in fewer bytes
    assert torch.equal(matrices.cpu(), want if kept else want.to(wanted))


def weights(rows: int = 64, columns: int = 96) -> torch.Tensor:
    """bfloat16 values of all sizes, with ties, a group of zeros and one of equal numbers."""
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(rows, columns, generator=generator)
    w *= 2.0 ** torch.randint(-12, 3, (rows, columns // 32), generator=generator).repeat_interleave(
        32, 1
    )
    w[0, :32], w[1, 32:64] = 0, -3.0
    w[2, :32] = torch.arange(32) - 15.5  # halves: many ties
    return w.bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_quantization_by_hand(dtype, device):
    """Against the oracle's numpy: largest magnitude / 7.5, to bfloat16; nearest code, ties even."""
    w = weights()
    codes, scale = quantize_int4(w.to(device, dtype))
    rest = torch.ones(64, 3, dtype=torch.bool)
    rest[0, 0] = False  # the oracle has no group of zeros
    some = w.double().numpy() + np.where(rest.numpy(), 0, 1).repeat(32, 1)
    want, want_scale = oracle.quantize(some)
    got = oracle.unpack(codes.cpu().numpy(), 96)
    elements = rest.numpy().repeat(32, 1)
    assert (got == want)[elements].all()
    assert (scale.cpu().double().numpy() == oracle.from_bf16(want_scale))[rest].all()
    assert (got[0, :32] == 0).all() and scale[0, 0] == 2.0**-7
    assert got.min() == -8 and got.max() == 7


def test_int4_quantization_by_its_authors():
    """Against compressed-tensors, in float32, its scale rounded as it is when stored."""
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize

    arguments = QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=True)
    w = weights().float()
    groups = w.unflatten(1, (-1, 32))
    scale, zero = helpers.calculate_qparams(groups.amin(2), groups.amax(2), arguments)
    scale = scale.bfloat16()
    q = quantize(w, scale.float(), zero, arguments, dtype=torch.int8)
    codes, got = quantize_int4(w)
    nonzero = groups.abs().amax(2) > 0  # of zeros: any scale will do
    assert torch.equal(got[nonzero], scale[nonzero])
    assert torch.equal(codes, packing.pack_to_int32(q, 4))


@pytest.mark.parametrize("name", ["base", "fp8"])
def test_quantized_at_load_as_if_before(name, tmp_path, device):
    """The same bits as from a checkpoint that holds the oracle's INT4 of the same weights."""
    source = load_file(variant(name) / FILE)
    tensors = {}
    for key, x in source.items():
        if ".mlp.experts." not in key:
            tensors[key] = x.clone()
        elif key.endswith("weight"):
            if x.dtype == FP8:
                x = torch.from_numpy(block_by_block(x, source[f"{key}_scale_inv"]))
            q, scale = oracle.quantize(x.double().numpy())
            tensors[f"{key}_packed"] = torch.from_numpy(oracle.pack(q))
            tensors[f"{key}_scale"] = torch.from_numpy(scale.view(np.int16)).view(torch.bfloat16)
            tensors[f"{key}_shape"] = torch.tensor(x.shape, dtype=torch.int32)
    (tmp_path / "config.json").write_bytes((variant(name) / "config.json").read_bytes())
    save_file(tensors, tmp_path / FILE)
    for dtype in (torch.float32, torch.bfloat16):
        how = {"device": device, "dtype": dtype}
        want = load_model(tmp_path, **how).state_dict()
        got = load_model(variant(name), quantize="int4", **how).state_dict()
        assert want.keys() == got.keys() and any("gate_up_scale" in key for key in want)
        assert all(torch.equal(want[key], got[key]) for key in want)
    again = load_model(tmp_path, quantize="int4", **how).state_dict()  # is so already
    assert all(torch.equal(want[key], again[key]) for key in want)


def test_engine_quantizes():
    engine = Engine(variant("base"), device="cpu", quantize="int4", max_seq_len=32)
    assert engine.model.layers[1].mlp.experts.gate_up.dtype == torch.int32
    assert len(engine.generate([1, 2, 3], SamplingParams(max_tokens=4)).token_ids) == 4
    with says(ValueError, "quantize is 'int8', wants None or 'int4'"):
        Engine(variant("base"), device="cpu", quantize="int8")


def test_quantizing_wants_whole_groups():
    with says(CheckpointError, "experts.0.gate_proj is 45 x 205, INT4 wants multiples of 32"):
        load_model(variant("dims"), device="cpu", dtype=torch.float32, quantize="int4")


def test_int4_widths_and_values(tmp_path, device):
    """What take_int4_bank packs, unpacked by a product with unit vectors."""
    codes = torch.randint(16, (32, 64), generator=torch.Generator().manual_seed(3)).byte().numpy()
    scale = torch.rand(32, 2).bfloat16()
    shape = torch.tensor([32, 64], dtype=torch.int64)
    tensors = {"w.weight_packed": words(codes), "w.weight_scale": scale, "w.weight_shape": shape}
    save_file(tensors, tmp_path / FILE)

    def build(w):
        return w.take_int4_bank(["w"], 32, 64)

    bank, scales = load(Checkpoint(tmp_path), build, device=device, dtype=torch.float32)
    got = ops.int4_linear(torch.eye(64, device=device), bank[0], scales[0]).T
    np.testing.assert_array_equal(got.cpu().numpy(), values(codes, scale))
