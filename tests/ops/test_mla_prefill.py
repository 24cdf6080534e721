import os
from dataclasses import dataclass, replace

import pytest
import torch
from rotation import rotate_ref
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]
BF16 = torch.bfloat16
WIDE = (128, 64, 128)  # P, R, V of large models, which have tensor cores
SM_90 = (
    torch.cuda.is_available()
    and torch.cuda.get_device_capability()[0] == 9
    and os.environ.get("KDTREE_MMA_SYNC") != "1"
)
LARGE = pytest.mark.large


@dataclass
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_rope: torch.Tensor
    rope: torch.Tensor
    interleaved: bool = True
    scale: float = 1.0

    def run(self) -> torch.Tensor:
        return ops.mla_prefill(*vars(self).values())

    def part(self, rows: slice, heads: slice = slice(None)) -> "Case":
        """The rows alone, with the keys up to the last one's position."""
        N, keys = len(self.q), len(self.k_rope)
        first, end, _ = rows.indices(N)
        keys -= N - end
        return replace(
            self,
            q=self.q[first:end, heads],
            k=self.k[heads, :keys],
            v=self.v[heads, :keys],
            k_rope=self.k_rope[:keys],
        )


def case(N, keys, H, widths, dtype, device, rng, interleaved=True) -> Case:
    """Strided as a model has them; between rows and beyond the last there is NaN."""
    P, R, V = widths

    def rand(*shape):
        return torch.randn(shape, generator=rng).to(device, dtype)

    wide = torch.full((N, H * (P + R) + 8), float("nan"), dtype=dtype, device=device)
    q = wide[:, : H * (P + R)].unflatten(1, (H, P + R))
    k, v = (
        torch.full((H, keys + 150, width + 8), float("nan"), dtype=dtype, device=device)
        for width in (P, V)
    )
    latents = torch.full((keys + 150, R + 16), float("nan"), dtype=dtype, device=device)
    k, v, k_rope = k[:, :keys, :P], v[:, :keys, :V], latents[:keys, 16:]
    q.copy_(2 * rand(N, H, P + R))
    k.copy_(rand(H, keys, P))
    v.copy_(rand(H, keys, V))
    k_rope.copy_(rand(keys, R))
    # Any numbers, not cosines, so that a swap of the two halves shows.
    rope = torch.randn(keys + 3, R, generator=rng).to(device)
    return Case(q, k, v, k_rope, rope, interleaved, (P + R) ** -0.5)


def prefill_ref(c: Case):
    q, k, v, k_rope, rope = (x.double().cpu() for x in (c.q, c.k, c.v, c.k_rope, c.rope))
    (N, _, _), (_, keys, P) = q.shape, k.shape
    rotated, _ = rotate_ref(q[..., P:].numpy(), rope[keys - N : keys, None].numpy(), c.interleaved)
    rotated = torch.from_numpy(rotated).to(c.q.dtype).double()
    score = torch.einsum("nhp,hkp->nhk", q[..., :P], k)
    score = (score + torch.einsum("nhr,kr->nhk", rotated, k_rope)) * c.scale
    hidden = torch.ones(N, keys, dtype=torch.bool).triu(keys - N + 1)
    weight = score.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    want, scale = (torch.einsum("nhk,hkv->nhv", weight, x) for x in (v, v.abs()))
    return want.numpy(), scale.numpy()


def check(c: Case) -> None:
    widths = c.k.shape[2], c.k_rope.shape[1], c.v.shape[2]
    fast = c.q.is_cuda and SM_90 and c.q.dtype == BF16 and widths == WIDE
    assert_close("mla_prefill_sm90" if fast else "mla_prefill", c.run(), *prefill_ref(c))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "N, keys, H, widths",
    [
        (1, 1, 1, (1, 2, 1)),
        (3, 3, 3, (7, 6, 5)),
        (5, 140, 2, (33, 16, 24)),
        (130, 300, 1, (16, 0, 140)),
        (1, 1, 1, WIDE),
        (3, 131, 3, WIDE),
        (65, 65, 2, WIDE),
        pytest.param(300, 700, 5, WIDE, marks=LARGE),
    ],
)
def test_matches_float64(N, keys, H, widths, interleaved, dtype, device, rng):
    check(case(N, keys, H, widths, dtype, device, rng, interleaved))


@pytest.mark.parametrize("context", [0, 1, 63, 64, 127, 128, 129, 250])
@pytest.mark.parametrize("N", [1, 64, 65, 129])
@pytest.mark.parametrize("widths", [(4, 2, 3), WIDE])
def test_mean_of_visible(context, N, widths, device, rng):
    """With q = 0 every key up to a row's position weighs the same, and no other counts."""
    c = case(N, context + N, 1, widths, BF16, device, rng)
    c.q.zero_()
    sums = c.v[0].double().cumsum(0)[context:]
    want = sums / torch.arange(context + 1, context + N + 1, device=device)[:, None]
    scale = c.v[0].double().abs().cumsum(0)[context:]
    scale /= torch.arange(context + 1, context + N + 1, device=device)[:, None]
    got = c.run()[:, 0]
    assert_close("mla_prefill_sm90", got, want.cpu().numpy(), scale.cpu().numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(7, 4, 5), WIDE])
def test_chunks_and_rows_alone(widths, dtype, device, rng):
    """A row has the bits that it has in any other chunk, and beside any other heads."""
    N, keys, H = 150, 333, 3
    c = case(N, keys, H, widths, dtype, device, rng)
    whole = c.run()
    assert torch.equal(whole, c.run())
    for rows in (slice(0, 64), slice(64, 150), slice(0, 1), slice(77, 78), slice(20, 149)):
        assert torch.equal(c.part(rows).run(), whole[rows])
    for heads in (slice(0, 1), slice(1, 3)):
        assert torch.equal(c.part(slice(3, 90), heads).run(), whole[3:90, heads])


def test_large_scores(device, rng):
    """The largest score is anywhere, and far above the others."""
    for at in (0, 5, 130, 255):
        c = case(3, 256 + 3, 1, WIDE, BF16, device, rng)
        c.k[0, at] = 40 * c.q[2, 0, :128] / c.q[2, 0, :128].norm()
        check(c)
        near = c.run()[2, 0].float() - c.v[0, at].float()
        assert near.abs().max() < 1e-2


@pytest.mark.skipif(not SM_90, reason="no sm_90")
def test_many_long_contexts(rng):
    """Rows of every tile of a large chunk, against the plain softmax."""
    device = torch.device("cuda")
    c = case(2048, 5000, 2, WIDE, BF16, device, rng)
    got = c.run()
    want, scale = prefill_ref(c)
    assert_close("mla_prefill_sm90", got, want, scale)


@pytest.mark.skipif(not SM_90, reason="no sm_90")
def test_heads_far_apart(rng):
    """Beyond 2^31 elements."""
    device, apart = torch.device("cuda"), 2**31 + 64
    c = case(70, 200, 2, WIDE, BF16, device, rng)
    memory = torch.empty(apart + 2 * 200 * 128, dtype=BF16, device=device)
    far = [memory.as_strided((2, 200, 128), (apart, 128, 1), i * 200 * 128) for i in range(2)]
    moved = replace(c, k=far[0].copy_(c.k), v=far[1].copy_(c.v))
    assert torch.equal(moved.run(), c.run())


@pytest.mark.skipif(not SM_90, reason="no sm_90")
def test_unaligned_is_refused(rng):
    device = torch.device("cuda")
    c = case(3, 70, 2, WIDE, BF16, device, rng)
    for name in ("q", "k", "v", "k_rope"):
        x = getattr(c, name)
        shifted = torch.empty(x.numel() + 1, dtype=BF16, device=device)[1:].view(x.shape)
        with pytest.raises(RuntimeError, match="wants q, k, v, k_rope and their rows on 16 bytes"):
            replace(c, **{name: shifted.copy_(x)}).run()
    check(c)


def test_no_rows(device, rng):
    c = case(0, 5, 2, (3, 2, 4), torch.float32, device, rng)
    assert c.run().shape == (0, 2, 4)


def test_registration(device, rng):
    c = case(3, 5, 2, (3, 2, 4), torch.float32, device, rng)
    arguments = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in vars(c).values())
    opcheck(torch.ops.kdtree.mla_prefill, arguments)


def test_rejects_bad_arguments(device, rng):
    c = case(3, 5, 2, (3, 2, 4), torch.float32, device, rng)
    wrong = [
        ({"k": c.k[:1]}, r"k has shape \[1, 5, 3\], wants \[2, 5, 3\]"),
        ({"k": c.k[:, :, :2]}, r"q has shape \[3, 2, 5\], wants \[3, 2, 4\]"),
        ({"v": c.v[:, :4]}, r"v has shape \[2, 4, 4\], wants \[2, 5, 4\]"),
        ({"v": c.v.bfloat16()}, "v has dtype BFloat16, wants Float"),
        ({"k_rope": c.k_rope[:4]}, r"k_rope has shape \[4, 2\], wants \[5, 2\]"),
        ({"k_rope": c.k_rope.T.contiguous().T}, "k_rope must have contiguous features"),
        ({"q": c.q.transpose(0, 1).contiguous().transpose(0, 1)}, "q must have contiguous heads"),
        ({"rope": c.rope[:0]}, "rope has no positions"),
        ({"scale": 0.0}, "scale is 0, wants a positive number"),
        ({"q": c.q[:2].repeat(3, 1, 1)}, "k has 5 keys, wants at least q's 6 rows"),
    ]
    for change, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            replace(c, **change).run()
    double = replace(c, **{n: getattr(c, n).double() for n in ("q", "k", "v", "k_rope")})
    with pytest.raises(RuntimeError, match="q has dtype Double, wants Float or BFloat16"):
        double.run()
