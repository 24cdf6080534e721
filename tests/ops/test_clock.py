import time

import pytest
import torch
from says import says
from torch.library import opcheck

from kdtree import ops


def test_goes_on_between_two_marks(device):
    """What stands between them on the device is what it counts."""
    times = torch.zeros(3, dtype=torch.int64, device=device)
    ops.clock(times, 0)
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
    else:
        time.sleep(0.01)
    ops.clock(times, 2)
    first, untouched, last = times.tolist()
    assert untouched == 0 and 0.003e9 < last - first < 5e9


def test_registration(device):
    times = torch.zeros(2, dtype=torch.int64, device=device)
    # Its result is never twice the same, which is what the last of the usual checks asks for.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(torch.ops.kdtree.clock, (times, 1), test_utils=checks)


@pytest.mark.parametrize("slot", [-1, 2])
def test_rejects_bad_arguments(slot, device):
    times = torch.zeros(2, dtype=torch.int64, device=device)
    with says(RuntimeError, f"slot is {slot}, wants 0 to 1"):
        ops.clock(times, slot)
    with says(RuntimeError, "times has dtype Float, wants Long"):
        ops.clock(times.float(), 0)
