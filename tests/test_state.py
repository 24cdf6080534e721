"""Stopping, limits and the record of a round, without a model."""

import pytest
import torch

from kdtree import CapacityError, SamplingParams
from kdtree.state import FAILED, LENGTH, RUNNING, STOP, State
from kdtree.tree import Path


def path(tokens, failed=False, device="cpu"):
    J = 8
    token = torch.full((1, J), -1, dtype=torch.int64, device=device)
    token[0, : len(tokens)] = torch.tensor(tokens)
    return Path(
        node=torch.zeros(1, J, dtype=torch.int32, device=device),
        length=torch.tensor([len(tokens)], dtype=torch.int32, device=device),
        token=token,
        logprob=torch.zeros(1, J, device=device),
        failed=torch.tensor([failed], device=device),
    )


def run(tokens, *, max_tokens, stop=(), failed=False, device="cpu"):
    state = State(1, 64, torch.device(device))
    state.start(0, [7, 8], SamplingParams(max_tokens=max_tokens), list(stop))
    record = state.commit(path(tokens, failed, device))[0].tolist()
    known = state.token[0, : int(state.length[0])].tolist()
    return record[0], record[1], known[2:], bool(state.active[0])


@pytest.mark.parametrize(
    "tokens, max_tokens, stop, failed, want",
    [
        ([10, 11, 99, 20], 5, [99], False, (3, STOP, [10, 11, 99], False)),
        ([10, 11, 12, 13, 14, 15, 99], 5, [99], False, (5, LENGTH, [10, 11, 12, 13, 14], False)),
        ([10, 11, 12, 13, 99], 5, [99], False, (5, STOP, [10, 11, 12, 13, 99], False)),
        ([10, 11], 5, [99], False, (2, RUNNING, [10, 11], True)),
        ([98, 99], 5, [99, 98], False, (1, STOP, [98], False)),
        ([10, 11], 5, [], True, (2, FAILED, [10, 11], False)),
        ([], 5, [], True, (0, FAILED, [], False)),
        ([10, 99], 5, [99], True, (2, STOP, [10, 99], False)),
        ([10, 11], 2, [], True, (2, LENGTH, [10, 11], False)),
    ],
)
def test_commit(tokens, max_tokens, stop, failed, want, device):
    got = run(tokens, max_tokens=max_tokens, stop=stop, failed=failed, device=device)
    assert got == want


def test_root_is_the_last_kept_token(device):
    state = State(1, 64, device)
    state.start(0, [7, 8], SamplingParams(max_tokens=9), [])
    assert state.root().tolist() == [8]
    state.commit(path([10, 11, 12], device=device))
    assert state.root().tolist() == [12]


def test_limits():
    state = State(1, 8, torch.device("cpu"))
    with pytest.raises(CapacityError, match="a prompt of 8 tokens .* context of 8"):
        state.check([1] * 8, [])
    with pytest.raises(CapacityError, match="65 stop tokens asked, 64 available"):
        state.check([1], list(range(65)))
    state.check([1] * 7, [])
