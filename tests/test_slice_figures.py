"""The figures of a slice by hand: experts that are read, floors, parts of a forward, traces."""

import pytest
import torch
from slice_case import made

from kdtree.cli import machine
from kdtree.cli.slices import floors, model, parts, timing
from kdtree.cli.slices.timing import Times, Trace

PEAKS = machine.Peaks(bandwidth=1e9, peak=1e11)


@torch.no_grad()
def test_distinct_experts_are_counted(device):
    slice_ = made(layers=3, device=device)
    chosen = {1: [[0, 1], [1, 2], [-1, -1]], 2: [[5, 6], [7, 8], [9, 10]]}
    for layer, ids in chosen.items():
        ids = torch.tensor(ids, dtype=torch.int32, device=device)
        weights = torch.ones_like(ids, dtype=torch.float32)
        slice_.model.layers[layer].mlp.gate.register_forward_hook(
            lambda module, args, out, ids=ids, weights=weights: (ids, weights)
        )
    assert slice_.experts(slice_.trees(3)) == [3, 6]


@torch.no_grad()
def test_what_is_counted_is_what_the_forward_chooses(device):
    """By the router itself, on the rows that it gets: other trees choose others."""
    slice_, seen = made(layers=2, device=device), []
    mlp = slice_.model.layers[1].mlp
    mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1].clone()))
    trees = slice_.trees(5)
    got = slice_.experts(trees)
    assert len(seen) == model.SETS and all(ids.shape == (5, 2) for ids in seen)
    assert got == [sum(len(ids.unique()) for ids in seen) / model.SETS]
    assert len({tuple(ids.flatten().tolist()) for ids in seen}) == model.SETS


# Of TINY, float32: elements of an attention's matrices, w_uk and w_uv for kv_b_proj.
ATTENTION = 64 * 48 + 48 * 4 * 40 + 64 * 48 + 4 * 64 * 32 + 4 * 40 * 64
NORMS = 48 + 32 + 2 * 64
LATENTS = 100 * 48 * 4  # bytes of 100 tokens


def test_the_floor_of_a_dense_layer():
    got = floors.layer(made(), 0, 3, 0.0, PEAKS)
    elements = ATTENTION + 3 * 64 * 96
    assert got.bytes == 4 * (elements + NORMS) + LATENTS
    assert got.flops == 2 * 3 * elements + 2 * 100 * (2 * 32 + 16) * 3 * 4
    assert got.seconds == pytest.approx(got.bytes / 1e9)  # all of it bound by memory


@pytest.mark.parametrize(
    "weights, expert",
    # Codes of half a byte and a float32 scale for 32 of them, or float32
    [("random-int4", 3 * 64 * 32 * (0.5 + 4 / 32)), ("random-bf16", 3 * 64 * 32 * 4)],
)
@pytest.mark.parametrize("read", [2.0, 5.5, 16.0])
def test_the_floor_of_a_moe_layer(weights, expert, read):
    got = floors.layer(made(weights=weights), 1, 3, read, PEAKS)
    elements = ATTENTION + 3 * 64 * 32 + 16 * 64  # a shared expert, the router
    assert got.bytes == 4 * (elements + NORMS + 16) + LATENTS + read * expert
    attention = 2 * 100 * (2 * 32 + 16) * 3 * 4
    assert got.flops == 2 * 3 * (elements + 2 * 3 * 64 * 32) + attention
    assert got.seconds == pytest.approx(got.bytes / 1e9)


def test_each_product_is_bound_by_memory_or_flops():
    slow = machine.Peaks(bandwidth=1e9, peak=2e9)  # a node's 2 flops an element: 4 bytes, 1 ns
    slice_ = made()
    dense = ATTENTION + 3 * 64 * 96
    got = floors.layer(slice_, 0, 8, 0.0, slow)
    attention = 2 * 100 * (2 * 32 + 16) * 8 * 4
    want = 2 * 8 * dense / 2e9 + 4 * NORMS / 1e9 + attention / 2e9
    assert got.seconds == pytest.approx(want)
    head = floors.matrices(slice_.model.lm_head.parameters(), 8, slow)
    assert (head.bytes, head.flops) == (512 * 64 * 4, 2 * 8 * 512 * 64)
    assert head.seconds == pytest.approx(head.flops / 2e9)


@torch.no_grad()
def test_a_part_is_the_difference_of_two_forwards(monkeypatch):
    """No layers 5 us, a dense one 100, two with experts 300 each, the head 50."""
    slice_ = made(layers=3)

    def measured(layers, head):
        experts = max(layers - 1, 0)
        us = 5 + 100 * (layers > 0) + 300 * experts + 50 * head
        kernels = {"embed": (2, 4.0)}
        if layers:
            kernels["norm"] = (2.0 * layers, 10.0 * layers)
        if experts:
            kernels["experts"] = (1.0 * experts, 200.0 * experts)
        if head:
            kernels["head"] = (1, 45.0)
        return Times(us, Trace(1.25 * us, 4 + 10 * layers + 200 * experts + 45 * head, kernels))

    def measure(forms, device):
        assert all(len(runs) == model.SETS for runs in forms)
        return [measured(runs[0].keywords["layers"], runs[0].keywords["head"]) for runs in forms]

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(model.Slice, "experts", lambda self, trees: [3.0, 6.0])
    found = parts.row(slice_, 4, PEAKS)
    rest, dense, experts, head = found["parts"]
    assert found["forward_us"] == 755 and found["experts"] == 4.5
    assert [p["us"] for p in found["parts"]] == [5, 100, 300, 50]
    assert [p["launches"] for p in found["parts"]] == [2, 2, 3, 1]
    assert [p["gaps"] for p in found["parts"]] == pytest.approx(
        [1 - 4 / 6.25, 1 - 10 / 125, 1 - 210 / 375, 1 - 45 / 62.5]
    )
    assert [k["name"] for k in experts["kernels"]] == ["experts", "norm"]
    assert experts["kernels"][0] == {"name": "experts", "launches": 1, "us": 200}
    assert dense["kernels"] == [{"name": "norm", "launches": 2, "us": 10}]
    assert rest["floor_us"] is None and rest["ratio"] is None
    work = [floors.layer(slice_, i, 4, x, PEAKS) for i, x in enumerate([0.0, 3.0, 6.0])]
    assert dense["floor_us"] == pytest.approx(1e6 * work[0].seconds)
    assert experts["floor_us"] == pytest.approx(1e6 * (work[1].seconds + work[2].seconds) / 2)
    assert experts["ratio"] == pytest.approx(300 / experts["floor_us"])
    assert experts["gb_per_s"] == pytest.approx((work[1].bytes + work[2].bytes) / 2 / 300e-6 / 1e9)
    assert head["floor_us"] == pytest.approx(512 * 64 * 4 / 1e3)


def test_time_is_counted_once():
    """A kernel that begins early is counted from the end of those before it."""
    spans = [(10, 12, "a"), (11, 15, "b"), (11, 14, "c"), (17, 18, "a"), (18, 19, "b")]
    want = {"a": (2, 3), "b": (2, 4), "c": (1, 0)}
    assert timing.trace_of(spans) == Trace(9, 7, want)


def test_traces_subtract():
    more = Trace(12, 10, {"a": (4, 6.0), "b": (1, 2.0), "c": (2, 1.0)})
    less = Trace(5, 4, {"a": (2, 3.0), "c": (2, 0.5), "d": (1, 1.0)})
    left = more.less(less)
    assert left == Trace(7, 6, {"a": (2, 3.0), "b": (1, 2.0), "d": (-1, -1.0)})
    assert left.launches == 2
    assert more.over(2) == Trace(6, 5, {"a": (2, 3.0), "b": (0.5, 1.0), "c": (1, 0.5)})


@pytest.mark.parametrize(
    "name, want",
    [
        (
            "void kdtree::cuda::(anonymous namespace)::rms_norm_kernel<float, 8>(Params)",
            "rms_norm_kernel",
        ),
        ("Memset (Device)", "Memset"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, "
            "std::array<char*, 1ul> >(int, at::native::FillFunctor<int>)",
            "vectorized_elementwise_kernel<FillFunctor>",
        ),
        ("sm90_xmma_gemm_bf16", "sm90_xmma_gemm_bf16"),
    ],
)
def test_short_names(name, want):
    assert timing.short(name) == want


def test_measures_every_run_equally(device):
    counts = [0] * 4

    def run(i):
        counts[i] += 1
        return torch.ones(4, device=device) + i

    runs = [lambda i=i: run(i) for i in range(4)]
    one, two = timing.measure([runs[:2], runs[2:]], device)
    assert one.us > 0 and two.us > 0 and min(counts) >= 1
    assert device.type == "cuda" or len(set(counts)) == 1
    assert timing.eager_us(runs, device) > 0
