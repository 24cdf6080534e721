"""The trial of the INT4 ops that loading makes: what it refuses, and when it runs."""

import pytest
import torch
from variants import variant

from kdtree import ops
from kdtree.models import load_model
from kdtree.weights.int4_check import ROWS, check_int4

OPS = ("int4_linear", "moe_experts")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def untried():
    check_int4.cache_clear()
    yield
    check_int4.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """The calls of the two ops, by name and dtype; they still work."""
    made = []
    for op in OPS:
        real = getattr(ops, op)

        def counted(x, *operands, op=op, real=real):
            made.append((op, x.dtype))
            return real(x, *operands)

        monkeypatch.setattr(ops, op, counted)
    return made


def one_value(y):
    y[0, 5] += 0.03 * y.abs().amax()
    return y


def last_row(y):
    y[-1] = y[-1].roll(1)
    return y


def not_a_number(y):
    y[1, 63] = torch.nan
    return y


def tile(y):
    """Two runs of 8 outputs change places."""
    return y.unflatten(1, (-1, 8))[:, [1, 0, *range(2, 8)]].flatten(1)


def only_many_rows(y):
    return y * 1.05 if len(y) > 64 else y


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_ops_pass(dtype, device, calls):
    check_int4(device, dtype)
    assert calls == [(op, dtype) for _ in ROWS for op in OPS]


@pytest.mark.parametrize("spoil", [one_value, last_row, not_a_number, tile, only_many_rows])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_op_is_refused(dtype, op, spoil, device, monkeypatch):
    real = getattr(ops, op)
    monkeypatch.setattr(ops, op, lambda *operands: spoil(real(*operands)))
    for _ in range(2):  # what was refused is not remembered as right
        with pytest.raises(RuntimeError, match=f"{op} does not work on .*{device}") as caught:
            check_int4(device, dtype)
        assert str(dtype).removeprefix("torch.") in str(caught.value)


def test_the_message(monkeypatch):
    x = torch.full((3, 64), 7.0)
    monkeypatch.setattr(ops, "int4_linear", lambda *operands: x[: len(operands[0])])
    with pytest.raises(RuntimeError) as caught:
        check_int4(torch.device("cpu"), torch.float32)
    want = "int4_linear does not work on cpu in float32: in a trial 192 of 192 outputs are wrong"
    assert want in str(caught.value)
    assert "row 0 output 0, is 7 and should be " in str(caught.value)


def test_loading_int4_tries_once(device, calls):
    for _ in range(2):
        for dtype in DTYPES:
            load_model(variant("int4"), device=device, dtype=dtype)
    assert sorted(calls, key=str) == sorted(
        ((op, dtype) for op in OPS for dtype in DTYPES for _ in ROWS), key=str
    )


def test_quantising_tries_too(device, calls):
    load_model(variant("base"), device=device, dtype=torch.float32, quantize="int4")
    assert len(calls) == len(OPS) * len(ROWS)


def test_other_models_do_not_try(device, calls):
    load_model(variant("base"), device=device, dtype=torch.float32)
    assert not calls


def test_loading_refuses(device, monkeypatch):
    monkeypatch.setattr(ops, "moe_experts", lambda x, *operands: torch.zeros_like(x))
    with pytest.raises(RuntimeError, match="moe_experts does not work on"):
        load_model(variant("int4"), device=device, dtype=torch.float32)
    load_model(variant("base"), device=device, dtype=torch.float32)  # has no use for it
