import numpy as np
import pytest
import torch
from says import says
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]


def case(B, X, W, D, dtype, table_dtype, rng):
    """What a sequence knows no more of is wild."""
    length = torch.randint(1, X + 1, (B,), generator=rng, dtype=torch.int32)
    token = torch.randint(0, W, (B, X), generator=rng)
    token[torch.arange(X) >= length[:, None]] = 2**62
    table = torch.randn(W, D, generator=rng).to(table_dtype)
    return token, length, table, torch.randn(D, generator=rng).to(dtype)


def block_embed_ref(token, length, table, mask, slots, scale):
    rows = table.double().numpy()
    out = np.repeat(mask.double().numpy()[None, None], len(token), 0).repeat(slots, 1)
    for b, n in enumerate(length.tolist()):
        out[b, 0] = rows[np.clip(int(token[b, n - 1]), 0, len(rows) - 1)]
    return out * np.float64(np.float32(scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize(
    "B, X, W, D, slots", [(1, 1, 1, 1, 1), (3, 9, 50, 37, 8), (2, 5, 7, 300, 2)]
)
def test_matches_float64(B, X, W, D, slots, table_dtype, dtype, device, rng):
    given = case(B, X, W, D, dtype, table_dtype, rng)
    got = ops.block_embed(*(x.to(device) for x in given), slots, 1.3)
    assert got.dtype == dtype
    assert_close("block_embed", got, block_embed_ref(*given, slots, 1.3))


def test_rows_and_ids_out_of_range(device, rng):
    """A length below 1 or beyond the room, and an id that no row has, read the nearest."""
    token, length, table, mask = case(4, 5, 6, 3, torch.float32, torch.float32, rng)
    token[:], length[:] = torch.arange(5), torch.tensor([0, 9, -3, 2], dtype=torch.int32)
    token[3] = torch.tensor([0, -(2**62), 0, 0, 0])
    got = ops.block_embed(*(x.to(device) for x in (token, length, table, mask)), 1, 1.0)[:, 0]
    assert torch.equal(got.cpu(), table[[0, 4, 0, 0]])


def test_empty(device, rng):
    given = [x.to(device) for x in case(2, 3, 4, 5, torch.float32, torch.float32, rng)]
    assert ops.block_embed(*given, 0, 1.0).shape == (2, 0, 5)


def test_registration(device, rng):
    given = [x.to(device) for x in case(2, 3, 4, 5, torch.bfloat16, torch.float32, rng)]
    opcheck(torch.ops.kdtree.block_embed, (*given, 3, 2.0))


def test_rejects_bad_arguments(device, rng):
    given = [x.to(device) for x in case(2, 3, 4, 5, torch.float32, torch.float32, rng)]
    names = ("token", "length", "table", "mask")

    def refuses(message, slots=3, **changed):
        with says(RuntimeError, message):
            ops.block_embed(*(dict(zip(names, given, strict=True)) | changed).values(), slots, 1.0)

    token, length, table, mask = given
    refuses("token has dtype Int, wants Long", token=token.int())
    refuses("token has room for none", token=token[:, :0].contiguous())
    refuses("length has shape [1], wants [2]", length=length[:1])
    refuses("length has dtype Long, wants Int", length=length.long())
    refuses("table has dtype Double, wants Float or BFloat16", table=table.double())
    refuses("table has no rows", table=table[:0])
    refuses("mask has shape [4], wants [5]", mask=mask[:4])
    refuses("slots is -1, wants 0 or more", slots=-1)
