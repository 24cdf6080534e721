import numpy as np
import pytest
import torch
from int4 import random_int4, values, words
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

BANKS = ["float32", "bfloat16", "int4-float32", "int4-bfloat16"]


class Bank:
    """Expert matrices [E, O, I]: what the op takes, and their float64 values."""

    def __init__(self, E, O, I, kind, device, rng):
        self.dtype = torch.bfloat16 if kind.endswith("bfloat16") else torch.float32
        if kind.startswith("int4"):
            codes, scale = random_int4((E, O, I), self.dtype, rng)
            self.values = values(codes, scale)
            self.w, self.scale = ops.int4_pack(words(codes).to(device), scale.to(device))
        else:
            w = (torch.randn(E, O, I, generator=rng) / 8).to(self.dtype)
            self.values, self.w, self.scale = w.double().numpy(), w.to(device), None


class Case:
    def __init__(self, T, D, F, E, K, kind, device, rng):
        self.gate_up, self.down = (
            Bank(E, 2 * F, D, kind, device, rng),
            Bank(E, D, F, kind, device, rng),
        )
        self.dtype = self.gate_up.dtype
        x = torch.full((T, D + 3), torch.nan)  # rows stand apart, with poison between them
        x[:, :D] = torch.randn(T, D, generator=rng)
        self.x = x.to(self.dtype).to(device)[:, :D]
        self.ids = torch.randint(E, (T, K), generator=rng, dtype=torch.int32).to(device)
        self.weights = torch.randn(T, K, generator=rng).to(device)
        self.shared = torch.randn(T, D, generator=rng).to(self.dtype).to(device)

    def args(self, rows=slice(None)):
        return (
            self.x[rows], self.ids[rows], self.weights[rows], self.gate_up.w, self.down.w,
            self.gate_up.scale, self.down.scale, self.shared[rows],
        )  # fmt: skip


def experts_ref(case: Case, with_shared=True):
    """y and the magnitudes of what was summed: gate and up errors reach y through the hidden."""
    x, shared = (t.double().cpu().numpy() for t in (case.x, case.shared))
    y = shared * with_shared
    scale = np.abs(y)
    for t, k in np.argwhere(case.ids.cpu().numpy() >= 0):
        e, weight = int(case.ids[t, k]), float(case.weights[t, k])
        gate_up, down = case.gate_up.values[e], case.down.values[e]
        gate, up = np.split(gate_up @ x[t], 2)
        gate_size, up_size = np.split(np.abs(gate_up) @ np.abs(x[t]), 2)
        silu = gate / (1 + np.exp(-gate))
        h = torch.from_numpy(silu * up).to(case.dtype).double().numpy()  # rounded as the op does
        size = 1.1 * gate_size * np.abs(up) + np.abs(silu) * up_size  # |silu'| < 1.1
        y[t] += weight * (down @ h)
        scale[t] += abs(weight) * (np.abs(down) @ (size + np.abs(h)))
    return y, scale


def assert_matches(case: Case):
    y = ops.moe_experts(*case.args())
    assert y.dtype == case.dtype
    assert_close("moe_experts", y, *experts_ref(case))


@pytest.mark.parametrize("kind", BANKS)
@pytest.mark.parametrize(
    "T, D, F, E, K",
    [
        (1, 32, 32, 1, 1),
        (3, 96, 160, 7, 3),
        (19, 160, 96, 3, 5),  # more rows than kernels take at once; an expert twice in a row
        pytest.param(2, 7168, 256, 3, 2, marks=pytest.mark.large),
        pytest.param(2, 256, 2048, 3, 2, marks=pytest.mark.large),
    ],
)
def test_matches_float64(T, D, F, E, K, kind, device, rng):
    assert_matches(Case(T, D, F, E, K, kind, device, rng))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("T, D, F", [(1, 1, 1), (5, 33, 7), (9, 70, 45)])
def test_odd_sizes(T, D, F, kind, device, rng):
    assert_matches(Case(T, D, F, 4, 2, kind, device, rng))


@pytest.mark.parametrize("kind", BANKS)
def test_unaligned_weights(kind, device, rng):
    """Scales, and plain weights, may start anywhere."""
    case = Case(3, 64, 96, 4, 2, kind, device, rng)
    want = ops.moe_experts(*case.args())

    def shift(w):
        return torch.cat([w.new_zeros(1), w.flatten()])[1:].view_as(w)

    for bank in (case.gate_up, case.down):
        if bank.scale is None:
            bank.w = shift(bank.w)
        else:
            bank.scale = shift(bank.scale)
    assert torch.equal(ops.moe_experts(*case.args()), want)


@pytest.mark.parametrize("kind", BANKS)
def test_absent_experts(kind, device, rng):
    case = Case(5, 64, 32, 6, 3, kind, device, rng)
    case.ids[0, 1] = case.ids[1, 0] = case.ids[1, 2] = -1
    case.ids[2] = -1  # a padded row, whose values must not be looked at
    case.weights[2] = torch.nan
    case.x[2] = torch.nan
    case.ids[3] = 4  # one expert three times
    case.ids[4] = -(2**31)
    y = ops.moe_experts(*case.args())
    assert torch.equal(y[2], case.shared[2]) and torch.equal(y[4], case.shared[4])
    alone = ops.moe_experts(*case.args()[:-1])
    assert (alone[2] == 0).all() and (alone[4] == 0).all()
    case.x[2] = case.weights[2] = 0
    assert_close("moe_experts", y, *experts_ref(case))
    assert_close("moe_experts", alone, *experts_ref(case, with_shared=False))


def test_order_of_the_sum(device, rng):
    """Over k in order, shared last, in float32: each other order gives another number."""
    D = 32
    gate_up = torch.ones(5, 2, D, device=device) * 4  # hidden is silu(128) * 128, about 2^14
    h = (128 / (1 + torch.tensor(-128.0).exp())) * 128
    terms = torch.tensor([2.0**24, 1, -(2.0**24), 1, 2.0**24]) / h
    down = terms.to(device).view(5, 1, 1).expand(5, D, 1).contiguous()
    ids = torch.tensor([[0, 1, 2, 3], [1, 3, 0, 2], [0, 2, 1, 3]], dtype=torch.int32).to(device)
    x, weights = torch.ones(3, D, device=device), torch.ones(3, 4, device=device)
    shared = torch.full((3, D), 2.0**24, device=device)
    y = ops.moe_experts(x, ids, weights, gate_up, down)
    assert y[:, 0].tolist() == [1, 2, 2]
    y = ops.moe_experts(x, ids, weights, gate_up, down, shared=shared)
    assert y[:, 0].tolist() == [2.0**24, 2.0**24 + 2, 2.0**24 + 2]


def test_hidden_is_rounded(device):
    """A product by 1 + 2^-7 of the rounded hidden is not that of the hidden."""
    D = 64
    gate_up = torch.zeros(1, 2 * D, D)
    gate_up[0, :D] = gate_up[0, D:] = torch.eye(D)
    down = torch.eye(D)[None] * (1 + 2.0**-7)
    x = torch.linspace(0.5, 3, D)[None].bfloat16()
    h = x.double() / (1 + (-x.double()).exp()) * x.double()
    want = (h.bfloat16().double() * (1 + 2.0**-7)).bfloat16()
    assert not torch.equal(want, (h * (1 + 2.0**-7)).bfloat16())
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    y = ops.moe_experts(
        x.to(device), ids, torch.ones(1, 1, device=device), gate_up.bfloat16().to(device),
        down.bfloat16().to(device),
    )  # fmt: skip
    assert torch.equal(y.cpu(), want)


@pytest.mark.parametrize("kind", BANKS)
@pytest.mark.parametrize("E", [5, 700])  # fewer and more experts than the pairs of a short call
def test_row_invariance(E, kind, device, rng):
    case = Case(1024, 32, 32, E, 3, kind, device, rng)
    case.ids[::7, 1] = -1
    want = ops.moe_experts(*case.args())
    assert torch.equal(ops.moe_experts(*case.args()), want)
    for T in (1, 2, 5, 17, 64):
        for first in (0, 3, 1024 - T):
            rows = slice(first, first + T)
            assert torch.equal(ops.moe_experts(*case.args(rows)), want[rows]), (T, first)
    shuffled = torch.randperm(1024, generator=rng).to(device)
    assert torch.equal(ops.moe_experts(*case.args(shuffled)), want[shuffled])


@pytest.mark.parametrize("kind", BANKS)
def test_row_invariance_of_longer_sums(kind, device, rng):
    case = Case(64, 544, 288, 3, 2, kind, device, rng)
    want = ops.moe_experts(*case.args())
    for first, last in ((0, 1), (5, 7), (20, 23), (0, 17), (63, 64)):
        rows = slice(first, last)
        assert torch.equal(ops.moe_experts(*case.args(rows)), want[rows])


@pytest.mark.large
@pytest.mark.parametrize("kind", ["int4", "plain"])
def test_banks_over_4_gb(kind, device):
    """The last expert of a bank is reached: Kimi's own INT4 bank, and a bfloat16 one."""
    if device.type == "cpu":
        pytest.skip("needs 10 GB")
    D, F, E = (7168, 2048, 384) if kind == "int4" else (7168, 512, 400)
    rng = torch.Generator(device).manual_seed(0)

    def bank(O, I):
        if kind == "plain":
            return torch.randn(E, O, I, generator=rng, device=device, dtype=torch.bfloat16), None
        shape = (E, O // 32, I // 32)
        w = torch.randint(
            -(2**31), 2**31, (*shape, 128), generator=rng, device=device, dtype=torch.int32
        )
        scale = torch.rand(*shape, 32, generator=rng, device=device, dtype=torch.bfloat16)
        return w, scale

    (gate_up, gate_up_scale), (down, down_scale) = bank(2 * F, D), bank(D, F)
    x = torch.randn(3, D, generator=rng, device=device).bfloat16() / 64
    weights = torch.ones(3, 1, device=device)
    for e in (0, E // 2, E - 1):
        ids = torch.full((3, 1), e, dtype=torch.int32, device=device)
        y = ops.moe_experts(x, ids, weights, gate_up, down, gate_up_scale, down_scale)
        one = slice(e, e + 1)
        scales = [s if s is None else s[one].clone() for s in (gate_up_scale, down_scale)]
        want = ops.moe_experts(
            x, ids * 0, weights, gate_up[one].clone(), down[one].clone(), *scales
        )
        assert torch.equal(y, want) and y.isfinite().all() and (y != 0).any()


@pytest.mark.parametrize("kind", BANKS)
def test_no_rows(kind, device, rng):
    assert ops.moe_experts(*Case(0, 32, 32, 2, 2, kind, device, rng).args()).shape == (0, 32)


@pytest.mark.parametrize("kind", ["float32", "int4-bfloat16"])
def test_registration(kind, device, rng):
    args = Case(2, 32, 32, 2, 2, kind, device, rng).args()
    opcheck(torch.ops.kdtree.moe_experts, args)
    opcheck(torch.ops.kdtree.moe_experts, (*args[:-1], None))


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("float32", {"ids": torch.zeros(2, 2).long()}, "ids has dtype Long, wants Int"),
        ("float32", {"weights": torch.zeros(2, 3)}, r"weights has shape \[2, 3\], wants \[2, 2\]"),
        (
            "float32",
            {"gate_up": torch.zeros(2, 32, 32)},
            r"gate_up has shape \[2, 32, 32\], wants \[2, 64, 32\]",
        ),
        ("float32", {"down": torch.zeros(3, 32, 32)}, r"down has shape \[3, 32, 32\], wants \[2,"),
        ("float32", {"down": torch.zeros(2, 32, 32).bfloat16()}, "down has dtype BFloat16, wants"),
        ("float32", {"gate_up_scale": torch.zeros(1)}, "gate_up has dtype Float, wants Int where"),
        ("float32", {"shared": torch.zeros(2, 31)}, r"shared has shape \[2, 31\], wants \[2, 32\]"),
        (
            "float32",
            {"ids": torch.zeros(2, 0).int(), "weights": torch.zeros(2, 0)},
            r"ids has shape \[2, 0\], wants at least one expert a row",
        ),
        ("int4-float32", {"down_scale": None}, "wants gate_up_scale and down_scale"),
        (
            "int4-float32",
            {"down_scale": torch.zeros(2, 1, 1, 31)},
            r"down_scale has shape \[2, 1, 1, 31\], wants \[2, 1, 1, 32\]",
        ),
        (
            "int4-float32",
            {"gate_up": torch.zeros(64, 32).int()},
            "gate_up has shape .*4 dimensions",
        ),
        ("int4-float32", {"x": torch.zeros(2, 33), "shared": None}, "D is 33, wants a multiple"),
    ],
)
def test_rejects_bad_arguments(kind, change, message, device, rng):
    names = "x ids weights gate_up down gate_up_scale down_scale shared".split()
    args = dict(zip(names, Case(2, 32, 32, 2, 2, kind, device, rng).args(), strict=True)) | change
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with pytest.raises(RuntimeError, match=message):
        ops.moe_experts(**args)
