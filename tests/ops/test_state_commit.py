import pytest
import torch
from torch.library import opcheck

from kdtree import ops
from kdtree.state import FAILED, LENGTH, RUNNING, STOP


def case(B, J, device, rng, S=64, X=60):
    """Lengths, limits and stop tokens at random, near enough to each other for every end."""

    def ints(low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=rng, dtype=dtype)

    length = ints(1, X - 2 * J, B)
    stop = ints(0, 200, B, S, dtype=torch.int64)
    stop[:, S // 2 :] = -1
    emitted, count = ints(0, 200, B, J, dtype=torch.int64), ints(0, J + 1, B)
    emitted[torch.arange(J) >= count[:, None]] = -1
    args = (
        ints(0, 200, B, X, dtype=torch.int64),
        length,
        torch.rand(B, generator=rng) > 0.2,
        length + ints(0, 2 * J, B),
        stop,
        emitted,
        count,
        torch.randn(B, J, generator=rng),
        torch.rand(B, generator=rng) < 0.3,
    )
    return [x.to(device) for x in args]


def state_commit_ref(token, length, active, limit, stop, emitted, count, logprob, failed):
    """One sequence after another, token by token. Changes its arguments; returns the record."""
    record = []
    for b in range(len(token)):
        kept, end = 0, FAILED if failed[b] else RUNNING
        room = int(limit[b] - length[b])
        for each in emitted[b, : min(int(count[b]), room)].tolist():
            token[b, length[b] + kept] = each
            kept += 1
            if each in stop[b].tolist():
                break
        if kept == room:
            end = LENGTH
        if kept and int(emitted[b, kept - 1]) in stop[b].tolist():
            end = STOP
        length[b] += kept
        active[b] &= end == RUNNING
        bits = logprob[b].view(torch.int32).tolist()
        record.append([kept, end, *emitted[b].tolist(), *bits])
    return torch.tensor(record)


@pytest.mark.parametrize("B, J, S", [(1, 1, 64), (50, 8, 1), (50, 16, 64), (20, 2, 33), (9, 40, 7)])
def test_matches_reference(B, J, S, device, rng):
    args = case(B, J, device, rng, S, X=4 * J + 10)
    want = [x.cpu().clone() for x in args]
    record = ops.state_commit(*args)
    assert torch.equal(record.cpu(), state_commit_ref(*want))
    assert all(torch.equal(x.cpu(), y) for x, y in zip(args, want, strict=True))


@pytest.mark.parametrize("N", [1, 33, 64])
def test_with_the_depths(N, device, rng):
    args, depth = case(7, 8, device, rng), torch.randint(0, 16, (7, N), generator=rng).int()
    depth[0], count = 0, args[6].cpu()
    want = ops.state_commit(*(x.clone() for x in args))
    got = ops.state_commit(*args, depth.to(device))
    assert torch.equal(got[:, 2:], want) and got.shape == (7, 20)
    assert torch.equal(got[:, 0].cpu(), depth.amax(1)) and torch.equal(got[:, 1].cpu(), count - 1)


def test_nothing_is_written_beyond(device, rng):
    """A count above J, and a limit above X, which no caller should give."""
    args = case(2, 4, device, rng, X=12)
    token, length, _, limit, stop, emitted, count, *_ = args
    length.fill_(10), limit.fill_(99), stop.fill_(-1), count.fill_(9)
    emitted.fill_(7)
    known, spare = token[:, :10].clone(), torch.full((4, 12), 5, device=device)
    args[0] = spare[1:3].copy_(token)
    assert ops.state_commit(*args)[:, 0].tolist() == [4, 4]
    assert torch.equal(args[0][:, :10], known) and (args[0][:, 10:] == 7).all()
    assert (spare[0] == 5).all() and (spare[3] == 5).all()


def test_sequences_are_independent(device, rng):
    args = case(5, 8, device, rng)
    each = [[x[b : b + 1].clone() for x in args] for b in range(5)]
    record = ops.state_commit(*args)
    for b, alone in enumerate(each):
        assert torch.equal(ops.state_commit(*alone)[0], record[b])
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone, args, strict=True))


def test_empty(device, rng):
    args = case(2, 4, device, rng)
    assert ops.state_commit(*(x[:0] for x in args)).shape == (0, 10)
    args[5], args[7] = args[5][:, :0], args[7][:, :0]
    assert ops.state_commit(*args)[:, 0].tolist() == [0, 0]


def test_registration(device, rng):
    opcheck(torch.ops.kdtree.state_commit, [*case(3, 8, device, rng), None])
    depth = torch.zeros(3, 5, dtype=torch.int32, device=device)
    opcheck(torch.ops.kdtree.state_commit, [*case(3, 8, device, rng), depth])


@pytest.mark.parametrize(
    "place, change, message",
    [
        (0, lambda x: x.int(), "token has dtype Int, wants Long"),
        (1, lambda x: x.long(), "length has dtype Long, wants Int"),
        (2, lambda x: x.byte(), "active has dtype Byte, wants Bool"),
        (3, lambda x: x[:1], r"limit has shape \[1\], wants \[2\]"),
        (4, lambda x: x[:, :0], "the number of stop tokens is 0, wants 1 to 64"),
        (4, lambda x: x.repeat(1, 2), "the number of stop tokens is 128, wants 1 to 64"),
        (5, lambda x: x.T.contiguous().T, "emitted must be contiguous"),
        (6, lambda x: x[:, None], r"count has shape \[2, 1\], wants \[2\]"),
        (7, lambda x: x[:, :3], r"logprob has shape \[2, 3\], wants \[2, 4\]"),
        (8, lambda x: x.int(), "failed has dtype Int, wants Bool"),
        (9, lambda x: x.long(), "depth has dtype Long, wants Int"),
        (9, lambda x: x[:, :0], "depth has no nodes"),
    ],
)
def test_rejects_bad_arguments(place, change, message, device, rng):
    depth = torch.zeros(2, 5, dtype=torch.int32, device=device)
    args = [*case(2, 4, device, rng), depth]
    args[place] = change(args[place])
    with pytest.raises(RuntimeError, match=message):
        ops.state_commit(*args)
