from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from rotation import rotate_ref
from tolerance import assert_close
from torch import Tensor
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-2  # large, so that a kernel that drops it fails
POSITIONS = 90


@dataclass
class Case:
    cache: Tensor
    kv: Tensor
    k_norm: Tensor
    eps: float
    rope: Tensor
    start: Tensor
    path: Tensor | None
    kept: Tensor | None
    rows: list[int]
    first: int

    def run(self, device="cpu") -> Tensor:
        """The cache after the call."""
        args = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        args["cache"] = args["cache"].clone()
        ops.block_append(*args.values())
        return args["cache"]


def random_case(sequences, rows, starts, N, J, G, width, dtype, rng, first=0) -> Case:
    """A path of J nodes of N a sequence, some kept; with J = 0 all N."""

    def rand(*shape):
        return torch.randn(shape, generator=rng).to(dtype)

    Q, L = len(starts), len(rows)
    path = torch.stack([torch.randperm(N, generator=rng)[:J].sort()[0] for _ in starts]).int()
    kept = torch.randint(0, J + 1, (Q,), generator=rng, dtype=torch.int32)
    path[torch.arange(J) >= kept[:, None]] = -1
    return Case(
        rand(sequences * sum(rows), 2, G, width),
        rand(Q, N, L, 2, G, width),
        (1 + 0.3 * rand(L, width)).to(dtype),
        EPS,
        torch.randn(POSITIONS, width, generator=rng),  # any numbers, so that swapped halves show
        torch.tensor(starts, dtype=torch.int32),
        path if J else None,
        kept if J else None,
        list(rows),
        first,
    )


def block_append_ref(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The cache after the call, and the magnitude of what was summed: 0 where nothing was."""
    cache, kv, norm, rope = (
        x.double().numpy() for x in (case.cache, case.kv, case.k_norm, case.rope)
    )
    want, scale = cache.copy(), np.zeros_like(cache)
    sequences = len(cache) // sum(case.rows)
    for q in range(kv.shape[0]):
        start, path = int(case.start[q]), range(kv.shape[1])
        if case.path is not None:
            path = case.path[q, : int(case.kept[q])].tolist()
        elif case.kept is not None:
            path = range(int(case.kept[q]))
        for i, node in enumerate(path):
            table = rope[min(start + i, POSITIONS - 1)]
            for layer, S in enumerate(case.rows):
                k, v = kv[q, node, layer]
                k = k / np.sqrt((k**2).mean(-1, keepdims=True) + EPS) * norm[layer]
                k, terms = rotate_ref(k, table, interleaved=False)
                at = sequences * sum(case.rows[:layer]) + (case.first + q) * S + (start + i) % S
                want[at], scale[at] = (k, v), (terms, 0 * v)
    return want, scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sequences, rows, starts, N, J, G, width, first",
    [
        (1, [20], [0], 1, 1, 1, 2, 0),
        (1, [60], [7], 8, 8, 2, 32, 0),
        (3, [60, 5, 60], [0, 3, 41], 12, 9, 3, 6, 0),  # a ring that is shorter than a path
        (4, [80, 70], [50, 2], 17, 0, 2, 128, 1),  # a prompt's chunks
        (2, [100, 9], [80], 30, 0, 1, 256, 1),  # beyond the table
    ],
)
def test_matches_float64(sequences, rows, starts, N, J, G, width, first, dtype, device, rng):
    case = random_case(sequences, rows, starts, N, J, G, width, dtype, rng, first)
    got, (want, scale) = case.run(device), block_append_ref(case)
    same = scale == 0  # values and what is not written
    assert np.array_equal(got.double().cpu().numpy()[same], want[same])
    assert_close("block_append", got, want, np.where(same, 1, scale))


def test_how_many_without_a_path(device, rng):
    case = random_case(2, [30, 30], [3, 9], 6, 0, 2, 8, torch.float32, rng)
    case.kept = torch.tensor([4, 0], dtype=torch.int32)
    assert torch.equal(case.run(), replace(case, path=torch.arange(6).int().repeat(2, 1)).run())
    want, scale = block_append_ref(case)
    assert_close("block_append", case.run(device), want, np.where(scale == 0, 1, scale))


@pytest.mark.parametrize("bad", [-1, 6, 2**31 - 1, -(2**31)])
def test_nodes_that_are_none_are_skipped(bad, device, rng):
    """And a position below 0 is none."""
    case = random_case(1, [30], [4], 6, 3, 2, 8, torch.float32, rng)
    case.path[:], case.kept[:] = torch.tensor([0, bad, 5]), 3
    got = case.run(device).cpu()
    assert torch.equal(got[5], case.cache[5]) and not torch.equal(got[6], case.cache[6])
    case.start[:] = -2
    got = case.run(device).cpu()
    assert torch.equal(got[1:], case.cache[1:]) and not torch.equal(got[0], case.cache[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_invariant(dtype, device, rng):
    """A node has the same bits alone, in another place of the tree and beside other sequences."""
    case = random_case(3, [80, 80], [5, 60, 0], 20, 12, 2, 48, dtype, rng)
    case.kept[:] = 12
    case.path[:] = torch.arange(12) + 3
    whole = case.run(device).view(2, 3, 80, 2, 2, 48)
    for q, start in enumerate(case.start.tolist()):
        for i in (0, 5, 11):
            alone = random_case(1, [80, 80], [start + i], 1, 0, 2, 48, dtype, rng)
            alone.kv[:] = case.kv[q, 3 + i]
            alone = replace(alone, k_norm=case.k_norm, rope=case.rope)
            got = alone.run(device).view(2, 1, 80, 2, 2, 48)
            assert torch.equal(got[:, 0, start + i], whole[:, q, start + i])


def test_no_rows(device, rng):
    case = random_case(2, [8], [3, 4], 5, 2, 1, 4, torch.float32, rng)
    for less in ({"kv": case.kv[:, :0]}, {"path": case.path[:, :0]}, {"kept": case.kept * 0}):
        assert torch.equal(replace(case, **less).run(device).cpu(), case.cache)


def test_registration(device, rng):
    case = random_case(2, [8, 5], [3, 4], 5, 2, 1, 4, torch.float32, rng)
    args = [x.to(device) if isinstance(x, Tensor) else x for x in vars(case).values()]
    opcheck(torch.ops.kdtree.block_append, tuple(args))


def test_rejects_bad_arguments(device, rng):
    case = random_case(2, [8, 5], [3, 4], 5, 2, 1, 4, torch.float32, rng)

    def rejects(message, **bad):
        with pytest.raises(RuntimeError, match=message):
            replace(case, **bad).run(device)

    kv, cache = case.kv, case.cache
    rejects(r"kv has shape \[2, 5, 2, 2, 4\], wants 6 dimensions", kv=kv[..., 0, :])
    rejects(r"kv has shape \[2, 5, 2, 1, 1, 4\], wants \[2, 5, 2, 2, 1, 4\]", kv=kv[:, :, :, :1])
    rejects("kv has dtype BFloat16, wants Float", kv=kv.bfloat16())
    rejects(r"k_norm has shape \[1, 4\], wants \[2, 4\]", k_norm=case.k_norm[:1])
    rejects(r"rope has shape \[90, 2\], wants \[90, 4\]", rope=case.rope[:, :2])
    rejects(r"start has shape \[1\], wants \[2\]", start=case.start[:1])
    rejects("path has dtype Long, wants Int", path=case.path.long())
    rejects("kept has dtype Long, wants Int", kept=case.kept.long())
    rejects("rows has 1 layers, wants kv's 2", rows=[13])
    rejects("rows holds 0, wants one or more a layer", rows=[13, 0])
    rejects("cache has 26 rows, wants a multiple of 12", rows=[8, 4])
    rejects("first is 1, wants 0 to 0", first=1)
    rejects("cache must be contiguous", cache=cache.transpose(0, 1).contiguous().transpose(0, 1))
