"""One arithmetic: whatever form moe_experts takes for a number of rows, a row has the same bits.

On a GPU packed bfloat16 experts are multiplied by groups of few rows or, where there are many pairs
(t, k) and rows stand on 16 bytes, of many.
"""

import pytest
import torch
from test_moe_experts import Case

from kdtree import ops

KIND = "int4-bfloat16"
MANY = 520  # pairs at least, of every case


def case_of(D, F, E, K, device, rng, T=None):
    case = Case(T or -(-MANY // K), D, F, E, K, KIND, device, rng)
    case.x = case.x.clone()  # rows side by side: on 16 bytes
    return case


def check_rows(case, counts):
    want = ops.moe_experts(*case.args())
    assert want.isfinite().all()
    for T in counts:
        for first in {0, 3, len(want) - T}:
            rows = slice(first, first + T)
            assert torch.equal(ops.moe_experts(*case.args(rows)), want[rows]), (T, first)


# tiles of D and F that fill stages and runs, and such that do not
@pytest.mark.parametrize(
    "D, F", [(1024, 128), (352, 96), (32, 32), (608, 544), (64, 1056), (2080, 544)]
)
def test_forms_agree(D, F, device, rng):
    case = case_of(D, F, 7, 4, device, rng)
    case.ids[::5, 2] = -1
    case.ids[::3, 1] = case.ids[::3, 0]  # twice in a row
    case.ids[4] = case.ids[-2] = -1
    check_rows(case, (1, 2, 8, 33, 64, 127))


def test_every_count(device, rng):
    case = case_of(160, 96, 5, 8, device, rng, T=70)
    case.ids[::4, 3] = -1
    check_rows(case, range(1, 71))


@pytest.mark.parametrize("E, K", [(1, 1), (6, 1), (1, 3), (1000, 64)])
def test_experts_at_the_limits(E, K, device, rng):
    check_rows(case_of(96, 64, E, K, device, rng, T=-(-MANY // K) + 7), (1, 7, 9))


def test_all_rows_to_one_expert(device, rng):
    case = case_of(160, 64, 9, 2, device, rng)
    case.ids[:] = 8
    check_rows(case, (1, 8, 9, 64, 65, 150))


def test_every_size_of_a_group(device, rng):
    """Groups of the forms for many rows are of up to 48 or 56, in tiles of 8."""
    case = case_of(160, 96, 1, 1, device, rng)
    check_rows(case, (*range(8, 73, 3), 48, 49, 57, 112, 113))


# the last tile row of a block's, runs of one tile and of none, an odd tile in a stage
@pytest.mark.parametrize("D, F", [(32, 1024), (96, 416), (416, 32), (1056, 224)])
def test_places_that_are_not_full(D, F, device, rng):
    check_rows(case_of(D, F, 3, 2, device, rng), (1, 30, 200))


# runs of several stages, longer than a ring, of none; more items than blocks; an odd tile
@pytest.mark.parametrize(
    "D, F, K", [(4096, 64, 8), (8192, 96, 5), (32, 512, 16), (2080, 512, 16), (6240, 448, 3)]
)
def test_one_row(D, F, K, device, rng):
    """Alone, a row of few hidden features is multiplied by kernels of its own."""
    case = case_of(D, F, 19, K, device, rng)
    case.ids[:3] = torch.randint(-1, 19, (3, K), generator=rng).int()  # some are absent
    case.ids[5, 0] = case.ids[6] = -1
    case.ids[7] = case.ids[8] = 18  # one expert only
    want = ops.moe_experts(*case.args())
    for row in range(9):
        rows = slice(row, row + 1)
        assert torch.equal(ops.moe_experts(*case.args(rows)), want[rows])


def test_scales_that_start_anywhere(device, rng):
    case = case_of(160, 96, 5, 8, device, rng)
    want = ops.moe_experts(*case.args())
    for pad in (1, 4):  # by 2 and 8 bytes
        for bank in (case.gate_up, case.down):
            room = torch.zeros(bank.scale.numel() + pad, dtype=bank.scale.dtype, device=device)
            room[pad:] = bank.scale.flatten()
            bank.scale = room[pad:].view(bank.scale.shape)
        assert torch.equal(ops.moe_experts(*case.args()), want)


def test_rows_that_start_anywhere(device, rng):
    case = case_of(160, 96, 5, 8, device, rng)
    want = ops.moe_experts(*case.args())
    for pad in (1, 2, 4):  # by 2, 4 and 8 bytes
        x = torch.full((len(want), 160 + pad), torch.nan, dtype=case.x.dtype, device=device)
        x[:, pad:] = case.x
        case.x = x[:, pad:]
        assert torch.equal(ops.moe_experts(*case.args()), want)
        assert torch.equal(ops.moe_experts(*case.args(slice(5, 9))), want[5:9])


@pytest.mark.parametrize("T", [3, 70])
def test_bits_from_run_to_run(T, device, rng):
    case = case_of(288, 160, 11, 8, device, rng, T=T)
    want = ops.moe_experts(*case.args())
    for _ in range(200 if device.type == "cuda" else 3):
        assert torch.equal(ops.moe_experts(*case.args()), want)


def test_calls_at_the_same_time(device, rng):
    """Nothing that calls share makes them differ."""
    if device.type != "cuda":
        pytest.skip("streams are CUDA's")
    cases = [case_of(256, 160, 11, 8, device, rng, T=T) for T in (1, 9, 40, 66)]
    want = [ops.moe_experts(*case.args()) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                got.append(ops.moe_experts(*case.args()))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want[i % len(cases)]) for i, y in enumerate(got))


@pytest.mark.parametrize("T", [1, 3, 33])
@pytest.mark.parametrize("F", [96, 544])
def test_operands_written_just_before(T, F, device, rng):
    """Kernels that begin before the one before has ended wait for what it writes."""
    case = case_of(2080, F, 11, 8, device, rng)
    operands = case.x, case.ids, case.weights, case.shared
    want = ops.moe_experts(*case.args())
    slot = [torch.empty_like(each[:T]) for each in operands]
    banks = case.args()[3:7]
    got = []
    firsts = range(0, len(want) - T, max(1, len(want) // 30))
    for first in firsts:
        for to, each in zip(slot, operands, strict=True):
            to.copy_(each[first : first + T])
        got.append(ops.moe_experts(*slot[:3], *banks, slot[3]))
    for first, y in zip(firsts, got, strict=True):
        assert torch.equal(y, want[first : first + T]), first
