"""Prompts in chunks: the same cache for the same prompt, whatever decodes after or beside it.

The model has the head widths that take the un-absorbed form on sm_90 in bfloat16; elsewhere the
same is asked of the absorbed one.
"""

import pytest
import torch
from fp8_rows import quantised, widened
from model_run import assert_near
from scored import ScoredConfig
from test_engine import engine_of, latents, outcome, poison
from test_taps import Recorded
from tolerance import model_limit
from variants import golden, variant

from kdtree import Engine, OracleConfig, SamplingParams, ops
from kdtree.cache import PAGE
from kdtree.drafters.none import NoneConfig
from kdtree.engine import PREFILL
from kdtree.errors import CapacityError
from kdtree.layers import prefill

NAME, ROWS = "wide-heads", 64
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def prompt_of() -> list[int]:
    return golden(NAME)["prompt.ids"].tolist()


def has_fast_form(device, dtype) -> bool:
    sm_90 = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return sm_90 and dtype == "bfloat16"


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int]]:
    """(rows, keys) of every call of the un-absorbed form."""
    made, run = [], ops.mla_prefill

    def counted(q, k, *rest):
        made.append((len(q), k.shape[1]))
        return run(q, k, *rest)

    monkeypatch.setattr(ops, "mla_prefill", counted)
    return made


def taps_of(device, dtype, prompt) -> torch.Tensor:
    """The residual stream after every layer, of all of the prompt but its last token."""
    config = Recorded(NoneConfig(), (0, 1, 2))
    engine = Engine(variant(NAME), drafter=config, device=str(device), dtype=dtype, max_seq_len=200)
    poison(engine)
    engine.generate(prompt, ONE)
    return torch.cat([taps[0] for _, taps in config.made[0].chunks])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 37, 64, 2048])
def test_chunks_match_float64(rows, dtype, device, monkeypatch, calls):
    """Any chunks, the last one uneven: every row's stream, and the drafter sees all of them."""
    monkeypatch.setitem(PREFILL, device.type, rows)
    prompt, want = prompt_of(), golden(NAME)
    n = len(prompt) - 1
    got = taps_of(device, dtype, prompt).double().cpu().numpy()
    for i in range(3):
        width = got.shape[1] // 3
        limit = model_limit(getattr(torch, dtype), i + 1)
        expected = want[f"layers.{i}.after_mlp"][:n]
        assert_near(f"layer {i}", got[:, i * width : (i + 1) * width], expected, limit)
    chunks = [(min(rows, n - start), min(start + rows, n)) for start in range(0, n, rows)]
    assert calls == ([c for c in chunks for _ in range(3)] if has_fast_form(device, dtype) else [])


def test_slices_of_heads(device, monkeypatch, calls):
    """Two heads at once, or one after the other where memory wants it."""
    monkeypatch.setitem(PREFILL, device.type, ROWS)
    prompt = prompt_of()
    whole = taps_of(device, "bfloat16", prompt).double().cpu().numpy()
    expected = len(calls)
    monkeypatch.setattr(prefill, "ROOM", 1)
    sliced = taps_of(device, "bfloat16", prompt).double().cpu().numpy()
    assert len(calls) == 3 * expected
    assert_near("stream", sliced, whole, model_limit(torch.bfloat16, 3))


@pytest.mark.parametrize("heads", [1, 8, 64, 128])
@pytest.mark.parametrize("pages", [1, 33, 545, 4097, 16384])
def test_memory_is_bounded(heads, pages):
    """Of keys and values: 1 GiB, or one head's; the heads of a slice fit in what there is."""
    config = engine_of("base", torch.device("cpu"), "float32").config.mla
    widths = {"heads": heads, "nope": 128, "value": 128, "kv_lora_rank": 512, "rope": 64}
    c = type(config)(**{k: widths.get(k, getattr(config, k)) for k in config.__slots__})
    cache = torch.empty(7, PAGE, 576, dtype=torch.bfloat16, device="meta")
    rows, scratch = prefill._memory(pages, cache, c)
    assert rows.shape == (pages, PAGE, 576)
    head = 2 * 256 * PAGE * pages
    assert scratch.numel() * 2 <= max(2**30, head)
    for keys in {1, PAGE, PAGE * pages // 3, PAGE * pages}:
        slices = prefill._slices(heads, 512 * keys)
        assert [h for s in slices for h in range(heads)[s]] == list(range(heads))
        assert all((s.stop - s.start) * 512 * keys <= scratch.numel() * 2 for s in slices)
        assert len(slices) == 1 or heads * 512 * keys > 2**30


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_more_than_there_is():
    c = engine_of("base", torch.device("cpu"), "float32").config.mla
    cache = torch.empty(1, PAGE, 576, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(CapacityError, match=r"a chunk of a prompt takes [\d.]+ GiB, cuda:0 has"):
        prefill._memory(2**24, cache, c)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_prompt_same_bits(dtype, device, monkeypatch):
    """Again, beside others, under a draft tree: the prompt's latents and all that follows."""
    monkeypatch.setitem(PREFILL, device.type, ROWS)
    prompt, params = prompt_of(), SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True)
    plain = engine_of(NAME, device, dtype)
    want = plain.generate(prompt, params)
    text, cached = prompt + want.token_ids, latents(plain, 0, len(prompt) + 29)
    poison(plain)
    assert plain.generate(prompt, params).token_ids == want.token_ids
    assert torch.equal(latents(plain, 0, len(prompt) + 29), cached)
    drafters = [OracleConfig((tuple(text),), 0.6, depth=9), ScoredConfig((tuple(text),)), "ngram"]
    for drafter in drafters:
        engine = engine_of(NAME, device, dtype, drafter, budget=12)
        assert engine.generate(prompt, params).token_ids == want.token_ids
        assert torch.equal(latents(engine, 0, len(prompt) + 29), cached)


def test_rows_in_fp8_are_widened_as_decoding_has_them(device, rng):
    """In runs of pages, whatever stands behind a row's scale."""
    c = engine_of("base", torch.device("cpu"), "float32").config.mla
    pages = 2 * prefill.RUN + 3
    rows = quantised(torch.randn(pages, PAGE, 80, generator=rng), 64).to(device)
    table = torch.randperm(pages, generator=rng).int()[: pages - 1].to(device)
    out = torch.zeros(pages - 1, PAGE, 80, dtype=torch.bfloat16, device=device)
    prefill._widen(rows, table, c, out)
    want = widened(rows[table.long()], 64, 16).float().bfloat16()
    assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8(dtype, device, monkeypatch):
    """AR and draft trees agree after a prompt of several chunks, whose rows have the same bits."""
    monkeypatch.setitem(PREFILL, device.type, ROWS)
    prompt, params = prompt_of(), SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True)
    plain = engine_of(NAME, device, dtype, kv_cache_dtype="fp8")
    want = plain.generate(prompt, params)
    drafter = OracleConfig((tuple(prompt + want.token_ids),), 0.6, depth=9)
    engine = engine_of(NAME, device, dtype, drafter, budget=12, kv_cache_dtype="fp8")
    assert engine.generate(prompt, params).token_ids == want.token_ids
    tokens = len(prompt) + 29
    assert torch.equal(latents(engine, 0, tokens), latents(plain, 0, tokens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_starts_while_others_decode(dtype, device, monkeypatch):
    monkeypatch.setitem(PREFILL, device.type, ROWS)
    text = prompt_of()
    prompts = [text[:3], text, text[:65], text[20:], text[:64], [7]]
    params = [SamplingParams(max_tokens=4 + 5 * i, temperature=1.0, seed=i) for i in range(6)]
    alone = engine_of(NAME, device, dtype)
    want = [outcome([alone.generate(p, s)]) for p, s in zip(prompts, params, strict=True)]
    for drafter in ("none", "ngram"):
        engine = engine_of(NAME, device, dtype, drafter, 2)
        got = engine.generate(prompts, params)
        assert [outcome([r]) for r in got] == want
