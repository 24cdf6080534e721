"""The loop over latents cached in FP8: lossless as over any others, for both ways of decoding read
the same rows, a node's own among them."""

import pytest
import torch
from fp8_rows import POISON, parts
from test_engine import Case, check_cache, check_trees, engine_of, latents, outcome

from kdtree import ConfigError, Engine, NgramConfig, SamplingParams
from kdtree.cache import fp8_row_bytes

DTYPES = ["float32", "bfloat16"]
FP8 = {"kv_cache_dtype": "fp8"}
CASES = (0, 2, 4, 5, 7, 11)  # none of "dims", whose latents have 57 features


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", CASES)
def test_trees_return_what_autoregression_returns(number, dtype, device):
    check_trees(Case(number), dtype, device, **FP8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accuracy", [1.0, 0.6])
def test_cache_after_compaction_is_that_from_scratch(accuracy, dtype, device):
    check_cache(accuracy, dtype, device, **FP8)


def test_a_sequence_does_not_depend_on_its_batch(device):
    prompts = [[7, 1, 7, 1, 7, 1], [5] * 70, [9, 300]]
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=i, logprobs=0) for i in range(3)]
    alone = engine_of("base", device, "float32", **FP8)
    want = [outcome([alone.generate(p, s)]) for p, s in zip(prompts, params, strict=True)]
    engine = engine_of("base", device, "float32", NgramConfig(), 2, **FP8)
    assert [outcome([r]) for r in engine.generate(prompts, params)] == want


def test_rows_are_near_those_of_a_plain_cache(device):
    """Half a step of three bits of mantissa off in the first layer, in which only rows differ."""
    prompt, params = list(range(100)), SamplingParams(max_tokens=1)
    engines = [engine_of("base", device, "float32", **options) for options in ({}, FP8)]
    for engine in engines:
        engine.generate(prompt, params)
    plain, fp8 = (latents(engine, 0, 99)[0].cpu() for engine in engines)
    assert engines[1].cache.data.shape[-1] == fp8_row_bytes(64, 16) == 112
    codes, scale, rope = parts(fp8, 64, 16)
    want, got = plain[:, :64], codes.float() * scale
    assert (abs(got - want) <= torch.maximum(abs(want) / 16, scale * 2.0**-10) * 1.001).all()
    assert torch.equal(rope, plain[:, 64:].bfloat16())
    assert (fp8[:, 68:80] == POISON).all()  # behind the scale nothing is written


def test_latents_that_do_not_divide():
    message = "kv_cache_dtype is 'fp8'.* a multiple of 16, but the model's is 57"
    with pytest.raises(ConfigError, match=message):
        engine_of("dims", "cpu", "float32", **FP8)


def test_the_demo_model(device):
    prompt, params = "def main():\n", SamplingParams(max_tokens=40)
    where = {"device": str(device), "max_seq_len": 200, **FP8}
    want = Engine(**where).generate(prompt, params)
    got = Engine(drafter="dflash", budget=7, **where).generate(prompt, params)
    assert got.token_ids == want.token_ids and got.metrics.acceptance_length > 1.5
