"""Plans against hand-computed numbers, published sizes, other programs' files and loaded models."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from says import says
from variants import names, variant

from kdtree import CapacityError
from kdtree.models import load_model
from kdtree.plan import Machine, formulas, make_plan, read
from kdtree.plan.tensors import PARTS

ROOT = Path(__file__).parent.parent
KIMI = ROOT / "tests/data/kimi-k2.6/config.json"
DEEPSEEK = ROOT / "tests/data/deepseek-v3/config.json"
EXPERT = 3 * 2048 * 7168  # weights of a routed expert of either
EIGHT = Machine(gpus=8, memory=141e9, reserve=6e9)


def planned(path, machine=EIGHT, context=8192, nodes=(1, 8, 64), **options):
    source = read(path)
    return make_plan(
        source.config, source.tensors, machine, context=context, nodes=nodes, **options
    )


def parts(made):
    return {part.part: part for part in made.parts}


@pytest.mark.parametrize(
    "path, parameters, stored, tensors",
    [
        # Of the published checkpoint's 208,550 tensors, 595,148,192,736 bytes, without vision's
        # 335, 942,287,840 bytes.
        (KIMI, 1_026_408_232_448, 594_205_904_896, 208_215),
        (DEEPSEEK, 671_026_419_200, None, None),
    ],
)
def test_published_totals(path, parameters, stored, tensors):
    source = read(path)
    assert planned(path).parameters == parameters
    assert stored is None or sum(each.bytes for each in source.tensors) == stored
    assert tensors is None or sum(each.count for each in source.tensors) == tensors


def test_parts_of_kimi():
    found = parts(planned(KIMI))
    # q_a, q_b, kv_a, kv_b, o and the two inner norms of a layer
    attention = 7168 * 1536 + 1536 * 12288 + 7168 * 576 + 512 * 16384 + 8192 * 7168 + 1536 + 512
    assert found["attention"].parameters == 61 * attention
    assert found["attention"].stored_bytes == 61 * attention * 2
    assert found["dense MLP"].parameters == 3 * 7168 * 18432
    assert found["shared experts"].parameters == 60 * EXPERT
    assert found["router"].parameters == 60 * (384 * 7168 + 384)
    assert found["routed experts"].parameters == 60 * 384 * EXPERT
    # Codes of half a byte, scales of two bytes a group of 32, shapes of 8 bytes a matrix
    assert found["routed experts"].stored_bytes == 60 * 384 * (EXPERT // 2 + EXPERT // 16 + 24)
    assert found["norms"].parameters == (2 * 61 + 1) * 7168
    assert found["embedding"].parameters == found["head"].parameters == 163840 * 7168
    assert found["routed experts"].stored_as == found["routed experts"].held_as == "int4"
    assert (found["router"].stored_as, found["router"].held_as) == ("bfloat16", "float32")


def test_parts_of_deepseek():
    found = parts(planned(DEEPSEEK))
    experts = found["routed experts"]
    assert experts.parameters == 58 * 256 * EXPERT
    # A byte a weight and a float32 a block of 128 x 128
    assert experts.stored_bytes == 58 * 256 * (EXPERT + 3 * 16 * 56 * 4)
    assert (experts.stored_as, experts.held_as) == ("fp8", "bfloat16")
    assert experts.rank_bytes == 58 * 256 * EXPERT * 2 // 8
    quantized = parts(planned(DEEPSEEK, int4=True))["routed experts"]
    assert quantized.held_as == "int4"
    assert quantized.rank_bytes == 58 * 256 * EXPERT * 9 // 16 // 8
    # 576 latents are 4.5 blocks of 128 rows: the last one is partial
    blocks = {each.name: each.shape for each in read(DEEPSEEK).tensors}
    assert blocks["kv_a_proj_with_mqa.weight_scale_inv"] == (5, 56)


def test_a_rank_of_kimi():
    """Everything divided by 8 but the compressions of the query and latent, router and norms."""
    made = planned(KIMI)
    whole = 61 * (7168 * (1536 + 576) + 1536 + 512)
    divided = 61 * (1536 * 12288 + 512 * 16384 + 8192 * 7168)
    assert parts(made)["attention"].rank_bytes == 2 * whole + 2 * divided // 8
    assert parts(made)["router"].rank_bytes == 60 * (384 * 7168 + 384) * 4
    assert parts(made)["routed experts"].rank_bytes == 60 * 384 * EXPERT * 9 // 16 // 8
    assert made.rank_bytes == 76_512_894_976


@pytest.mark.parametrize("ranks, gib", [(4, 139.6), (8, 70.6), (16, 36.2)])
def test_ranks_of_kimi_as_others_count_them(ranks, gib):
    """The same division with the router divided too and in bfloat16, as it is stored."""
    made = planned(KIMI, replace(EIGHT, gpus=ranks))
    router = 60 * 384 * 7168
    assert (made.rank_bytes - 4 * router + 2 * router / ranks) / 2**30 == pytest.approx(
        gib, abs=0.1
    )


def test_cache_bytes():
    assert formulas.cache_bytes(read(KIMI).config) == 61 * 576 * 2 == 70_272
    assert formulas.cache_bytes(read(DEEPSEEK).config) == 70_272
    assert planned(KIMI).cache_bytes == 70_272  # not divided by the ranks
    assert planned(KIMI, fp8=True).cache_bytes == 61 * (512 + 16 + 64 * 2) == 40_016


def test_longest_context():
    config = read(KIMI).config
    page = 64 * (70_272 + 64 * 4)  # latents, and 64 float32 of the rotary table
    assert formulas.longest_context(config, 10 * page) == 640 - 63
    assert formulas.longest_context(config, 10 * page - 1) == 576 - 63
    assert formulas.longest_context(config, page - 1) == 0
    assert formulas.longest_context(config, -1e9) == 0
    made = planned(KIMI)
    assert made.fitting == (141e9 - 6e9 - 76_512_894_976) // page * 64 - 63
    assert made.longest == 262_144
    tight = planned(KIMI, replace(EIGHT, memory=90e9))
    assert tight.longest == tight.fitting == 1658 * 64 - 63  # 7.487 GB in pages of 4.514 MB
    assert planned(KIMI, replace(EIGHT, memory=80e9)).longest == 0
    page = 64 * (40_016 + 64 * 4)
    assert formulas.longest_context(config, 10 * page, fp8=True) == 640 - 63
    tight = planned(KIMI, replace(EIGHT, memory=90e9), fp8=True)
    assert tight.longest == tight.fitting == (90e9 - 6e9 - 76_512_894_976) // page * 64 - 63
    assert {size.context for size in tight.sizes} == {0, tight.longest}


@pytest.mark.parametrize(
    "experts, per_token, rows, touched",
    [(384, 8, 1, 8), (384, 8, 2, 8 + 8 - 64 / 384), (384, 8, 16, 109.8), (384, 8, 64, 284.2),
     (256, 8, 8, 57.4), (4, 4, 3, 4)],
)  # fmt: skip
def test_distinct_experts(experts, per_token, rows, touched):
    assert formulas.distinct_experts(experts, per_token, rows) == pytest.approx(touched, abs=0.05)


def test_distinct_experts_of_real_draws():
    rng = torch.Generator().manual_seed(0)
    draws = torch.rand(400, 16, 384, generator=rng).topk(8).indices
    mean = sum(len(draw.unique()) for draw in draws) / len(draws)
    assert formulas.distinct_experts(384, 8, 16) == pytest.approx(mean, rel=0.01)


def test_attention_and_links():
    config = read(KIMI).config
    assert formulas.attention_bytes(config, 8192) == 8192 * 576 * 2
    assert formulas.attention_bytes(config, 8192, fp8=True) == 8192 * 656
    # 2 flops for each of 512 + 64 features of a score and 512 of a value
    assert formulas.attention_flops(config, 8192, 1, 1) == 2 * 8192 * 1088 * 64
    assert formulas.attention_flops(config, 8192, 16, 8) == 2 * 8192 * 1088 * 16 * 8
    assert formulas.seconds(4.42e12, 69e12, 4.42e12, 690e12) == 1.0
    assert formulas.seconds(4.42e11, 690e12, 4.42e12, 690e12) == 1.0
    assert formulas.all_reduces(config) == 124
    for rows, measured in ((1, 6.5e-6), (8, 7.2e-6), (16, 7.3e-6), (64, 9.9e-6)):
        assert formulas.all_reduce_seconds(config, rows) == pytest.approx(measured, rel=0.05)


def test_steps_of_kimi():
    """In ms, from bytes a rank: at 4.42 TB/s a GB takes 0.2262 ms."""
    one, eight, many = planned(KIMI).steps
    assert one.experts == pytest.approx(8)
    assert one.routed == pytest.approx(60 * 8 * 3.096576e-3 / 4.42, rel=1e-6)  # 24.8 MB / 8 each
    assert eight.routed == pytest.approx(one.routed * 59.5228 / 8, rel=1e-4)
    # Attention, shared experts, router, dense layer, norms and head in GB; not the embedding
    rest = 3.158430 + 0.660603 + 0.660695 + 0.099090 + 0.001763 + 0.293601
    assert one.rest == eight.rest == many.rest == pytest.approx(rest / 4.42, rel=1e-5)
    assert one.context == pytest.approx(61 * 8192 * 1152 / 4.42e9, rel=1e-9)  # bytes bind
    assert many.context == pytest.approx(61 * 2 * 8192 * 1088 * 64 * 8 / 690e9, rel=1e-9)  # flops
    assert one.all_reduce == pytest.approx(124 * 6.504e-3, rel=1e-3)
    assert one.read == one.routed + one.rest + one.context
    assert one.total == one.read + one.all_reduce


def test_steps_that_arithmetic_binds():
    """At 1 TFLOP/s every weight of the rank takes 2 flops a node."""
    made = planned(KIMI, replace(EIGHT, peak=1e12), context=1)
    step = made.steps[1]
    held = sum(
        p.rank_parameters for p in made.parts if p.part not in ("embedding", "routed experts")
    )
    assert step.rest == pytest.approx(1e3 * 2 * 8 * held / 1e12, rel=1e-3)
    # Every node its 8 experts, whoever shares them
    assert step.routed == pytest.approx(1e3 * 2 * 8 * 60 * 8 * EXPERT / 8 / 1e12, rel=1e-6)


def test_one_gpu_needs_no_links():
    made = planned(KIMI, Machine(gpus=1, memory=700e9, reserve=6e9))
    assert [step.all_reduce for step in made.steps] == [0, 0, 0]
    assert made.rank_bytes == 594_535_653_376


def test_legal_sizes():
    config = read(KIMI).config
    assert formulas.legal_sizes(config, True) == [1, 2, 4, 8, 16, 32, 64]
    assert formulas.legal_sizes(read(DEEPSEEK).config, True) == [1, 2, 4, 8, 16, 32, 64]
    assert formulas.legal_sizes(read(DEEPSEEK).config, False) == [1, 2, 4, 8, 16, 32, 64, 128]
    narrow = replace(config, moe=replace(config.moe, width=128))
    assert formulas.legal_sizes(narrow, True) == [1, 2, 4]
    assert formulas.indivisible(narrow, 8, True) == [
        "the experts' width 128 does not divide into multiples of 32 (INT4 groups)"
    ]
    assert formulas.indivisible(narrow, 8, False) == []
    four = replace(config, mla=replace(config.mla, heads=4))
    assert formulas.legal_sizes(four, True) == [1, 2, 4]
    assert "4 heads do not divide evenly" in formulas.indivisible(four, 3, True)
    odd = replace(config, vocab=509, dense_width=18433)
    assert formulas.indivisible(odd, 2, True) == [
        "the dense width 18433 does not divide evenly",
        "the vocabulary of 509 does not divide evenly",
    ]
    routed_only = replace(odd, moe=replace(config.moe, first_layer=0))
    assert len(formulas.indivisible(routed_only, 2, True)) == 1


def test_illegal_sizes_are_refused():
    with says(ValueError, "gpus is 3", "64 heads", "163840", "legal: 1, 2, 4, 8, 16, 32, 64"):
        planned(KIMI, replace(EIGHT, gpus=3))
    assert sorted(planned(KIMI).illegal) == [3, 5, 6, 7]
    with says(CapacityError, "context is 262145", "262144"):
        planned(KIMI, context=262_145)


def totals(source, part):
    """Tensors, parameters and bytes."""
    own = [each for each in source.tensors if each.part == part]
    return [sum(getattr(each, what) for each in own) for what in ("count", "parameters", "bytes")]


@pytest.mark.parametrize("name", names())
def test_config_and_headers_agree(name):
    """What a config implies is what a checkpoint that another program wrote holds."""
    directory = variant(name)
    headers, config = read(directory), read(directory / "config.json")
    assert (headers.headers, config.headers) == (True, False)
    assert headers.disagreements == ()
    for part in PARTS:
        assert totals(headers, part) == totals(config, part)


def memory(parameters):
    """Bytes of parameters, of which several may be one."""
    return sum({p.data_ptr(): p.numel() * p.itemsize for p in parameters}.values())


@pytest.mark.parametrize("name", names())
def test_held_bytes_are_those_of_a_loaded_model(name):
    model = load_model(variant(name), device="cpu", dtype=torch.bfloat16)
    made = planned(variant(name), Machine(gpus=1, memory=1e9, reserve=1e6), context=1)
    assert made.rank_bytes == memory(model.parameters())
    experts = [layer.mlp.experts for layer in model.layers if hasattr(layer.mlp, "experts")]
    routed = memory(p for each in experts for p in each.parameters())
    assert routed == (parts(made)["routed experts"].rank_bytes if experts else 0)


def test_a_tied_embedding_is_read_as_the_head():
    made = planned(variant("tied"), Machine(gpus=1, memory=1e9, reserve=1e6), context=1)
    rest = sum(part.rank_bytes for part in made.parts if part.part != "routed experts")
    assert "head" not in parts(made)
    assert made.steps[0].rest == pytest.approx(1e3 * rest / 4.42e12)
