"""A trial of the INT4 ops on the device that is to run them, before it is given weights.

A card on which they were never run shall refuse, not answer with garbage.
"""

from functools import cache

import torch
from torch import Tensor

from kdtree import ops
from kdtree.weights.formats import CODES, GROUP

SIDE = 64  # inputs and outputs of every matrix
EXPERTS = 3
ROWS = (3, 130)  # few and many: other tiles may serve them
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}  # of the sum of the absolute terms


@cache
def check_int4(device: torch.device, dtype: torch.dtype) -> None:
    """Compares int4_linear and moe_experts with float64, once a device and dtype of activations.

    Raises RuntimeError where a result is wrong.
    """
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(-(2**31), 2**31, (EXPERTS, 3 * SIDE, SIDE // CODES), generator=rng).int()
    scale = torch.rand(EXPERTS, 3 * SIDE, SIDE // GROUP, generator=rng).add(0.5).div(16).to(dtype)
    x = torch.randn(max(ROWS), SIDE, generator=rng).to(dtype)
    ids = torch.randint(EXPERTS, (len(x), 2), generator=rng)
    weights = torch.rand(ids.shape, generator=rng)

    packs = ops.int4_pack(codes.to(device), scale.to(device))
    gate_up, down = zip(*(each.split(2 * SIDE // GROUP, 1) for each in packs), strict=True)
    gate_up, down = [[part.contiguous() for part in each] for each in (gate_up, down)]
    w = _values(codes, scale)
    linear, experts = _product(x.double(), w[0, 2 * SIDE :]), _experts(x, ids, weights, w)
    for rows in ROWS:
        some = x[:rows].to(device)
        got = ops.int4_linear(some, *(part[0] for part in down))
        _compare("int4_linear", got, *linear)
        routing = ids[:rows].int().to(device), weights[:rows].to(device)
        got = ops.moe_experts(some, *routing, gate_up[0], down[0], gate_up[1], down[1])
        _compare("moe_experts", got, *experts)


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    """The float64 weights [..., O, I]."""
    nibbles = codes[..., None] >> torch.arange(0, 32, 4) & 15
    return (nibbles.flatten(-2) - 8) * scale.double().repeat_interleave(GROUP, -1)


def _product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., I] times w [..., O, I], and the sum of its absolute terms."""
    return (w @ x[..., None])[..., 0], (w.abs() @ x.abs()[..., None])[..., 0]


def _experts(x: Tensor, ids: Tensor, weights: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The routed experts' weighted sum, and the sum of its absolute terms."""
    gate_up, down = w[ids].split(2 * SIDE, -2)
    gate, up = _product(x.double()[:, None], gate_up)[0].chunk(2, -1)
    hidden = (gate.sigmoid() * gate * up).to(x.dtype).double()
    y, terms = _product(hidden, down)
    return (y * weights[..., None]).sum(1), (terms * weights[..., None]).sum(1)


def _compare(op: str, got: Tensor, want: Tensor, terms: Tensor) -> None:
    """Raises RuntimeError where an element is off, or is not a number."""
    want, terms, y = want[: len(got)], terms[: len(got)], got.double().cpu()
    wrong = ~((y - want).abs() <= ERROR[got.dtype] * terms)
    if wrong.any():
        row, output = wrong.nonzero()[0].tolist()
        raise RuntimeError(
            f"{op} does not work on {_name(got.device)} in {str(got.dtype).removeprefix('torch.')}:"
            f" in a trial {wrong.sum()} of {wrong.numel()} outputs are wrong, the first,"
            f" row {row} output {output}, is {y[row, output]:.6g} and should be"
            f" {want[row, output]:.6g}. INT4 weights cannot be used on this device."
        )


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} ({device}, sm_{major}{minor})"
