"""What a caller sees: text, tokens, streams, lists; and an engine that goes on after a mistake."""

import gc
from dataclasses import replace

import pytest
import torch
from demo_engine import (
    CODE,
    CONTEXT,
    FREE,
    KINDS,
    LISTING,
    SAMPLED,
    STORY,
    alone,
    engine_of,
    engine_of_kind,
    outcome,
    truth_of,
    whole_characters,
)

from kdtree import NumericsError, SamplingParams
from kdtree.engine import PREFILL

STREAMED = {
    "greedy": FREE,
    "one-token": SamplingParams(max_tokens=1),
    "sampled": SAMPLED,
    "stop-string": replace(FREE, stop=("src", "── a")),
    "stop-token": SamplingParams(max_tokens=15, stop_token_ids=(201,)),  # a line's end
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", STREAMED.values(), ids=STREAMED)
def test_stream_adds_up_to_generate(params, kind, device):
    want = alone(device, LISTING, params)
    free = replace(params, stop=(), stop_token_ids=(), ignore_eos=True)
    engine = engine_of_kind(kind, device, truth_of(alone(device, LISTING, free)))
    got = engine.generate(LISTING, params)
    assert outcome(got) == outcome(want)
    chunks = list(engine.stream(LISTING, params))
    assert "".join(c.text for c in chunks) == want.text
    assert [token for c in chunks for token in c.token_ids] == want.token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == want.finish_reason
    assert [c.acceptance for c in chunks] == [len(c.token_ids) for c in chunks]
    assert len(chunks) == got.metrics.rounds
    assert sum(c.acceptance for c in chunks) == got.metrics.tokens == len(want.token_ids)
    lengths = [sum(c.acceptance == i for c in chunks) for i in range(len(got.metrics.histogram))]
    assert lengths == got.metrics.histogram


@pytest.mark.parametrize("kind", ["none", "chain"])
def test_chunks_end_between_characters(kind, device):
    free = alone(device, LISTING)
    assert "├" in free.text and "\ufffd" not in free.text
    engine = engine_of_kind(kind, device, truth_of(free))
    ids, text, inside = [], "", 0
    for chunk in engine.stream(LISTING, FREE):
        ids, text = ids + chunk.token_ids, text + chunk.text
        if chunk.finish_reason is None:
            assert text == whole_characters(engine, ids)
            inside += text != engine.tokenizer.decode(ids)
    assert inside, "no round ended inside a character"
    assert text == free.text


def test_a_character_cut_by_the_limit_is_replaced(device):
    """The last token is half a character: nothing of it is lost without a trace."""
    engine, ids = engine_of(device), alone(device, LISTING).token_ids
    cut = next(n for n in range(1, 20) if engine.tokenizer.decode(ids[:n]).endswith("\ufffd"))
    got = engine.generate(LISTING, replace(FREE, max_tokens=cut))
    assert got.text == engine.tokenizer.decode(ids[:cut])
    chunks = list(engine.stream(LISTING, replace(FREE, max_tokens=cut)))
    assert chunks[-1].text.endswith("\ufffd")
    assert "".join(c.text for c in chunks) == got.text


@pytest.mark.parametrize("kind", ["none", "ngram"])
def test_text_is_its_tokens(kind, device):
    engine = engine_of_kind(kind, device)
    ids = engine.tokenizer.encode(LISTING)
    text, listed, tupled = (engine.generate(p, SAMPLED) for p in (LISTING, ids, tuple(ids)))
    assert outcome(text) == outcome(listed) == outcome(tupled)
    assert (text.prompt, listed.prompt) == (LISTING, None)
    assert text.prompt_token_ids == listed.prompt_token_ids == tupled.prompt_token_ids == ids
    assert text.text == engine.tokenizer.decode(text.token_ids)


@pytest.mark.parametrize("batch", [1, 2])
def test_lists_in_lists_out(batch, device):
    engine, short = engine_of(device, "ngram", batch), replace(SAMPLED, max_tokens=4)
    prompts = [STORY, engine.tokenizer.encode(CODE), LISTING]
    want = [alone(device, STORY, short), alone(device, CODE, short), alone(device, LISTING, short)]
    got = engine.generate(prompts, short)
    assert [outcome(r) for r in got] == [outcome(r) for r in want]
    assert [r.prompt for r in got] == [STORY, None, LISTING]
    assert outcome(engine.generate(STORY, short)) == outcome(want[0])
    [one] = engine.generate([STORY], short)
    [same] = engine.generate([STORY], [short])
    assert outcome(one) == outcome(same) == outcome(want[0])
    each = [replace(short, max_tokens=n, seed=n) for n in (5, 1, 3)]
    got = engine.generate(prompts, each)
    assert [outcome(r) for r in got] == [
        outcome(alone(device, p, q)) for p, q in zip((STORY, CODE, LISTING), each, strict=True)
    ]
    assert outcome(engine.generate(STORY, short)) == outcome(want[0])


def test_no_prompts(device):
    engine = engine_of(device)
    assert engine.generate([]) == engine.generate([], FREE) == engine.generate([], []) == []


@pytest.mark.parametrize("kind", ["none", "noisy", "ngram"])
@pytest.mark.parametrize("batch", [1, 2])
def test_completions_have_seeds_of_their_own(batch, kind, device):
    params = replace(SAMPLED, max_tokens=8, n=3)
    one = [alone(device, STORY, replace(params, n=1, seed=params.seed + i)) for i in range(3)]
    engine = engine_of_kind(kind, device, truth_of(*one), batch)
    got = engine.generate(STORY, params)
    assert [c.index for c in got.completions] == [0, 1, 2]
    assert [c[1:] for c in outcome(got)] == [outcome(r)[0][1:] for r in one]
    assert len({c.text for c in got.completions}) == 3


def other_generation_is_refused(engine) -> None:
    for start in (
        lambda: engine.generate(STORY, FREE),
        lambda: engine.generate([STORY], FREE),
        lambda: list(engine.stream(STORY, FREE)),
    ):
        with pytest.raises(ValueError, match="stream"):
            start()


@pytest.mark.parametrize("end", ["exhausted", "closed", "abandoned"])
@pytest.mark.parametrize("kind", ["none", "chain"])
def test_one_generation_at_a_time(kind, end, device):
    want = alone(device, STORY)
    engine = engine_of_kind(kind, device, truth_of(want))
    chunks = engine.stream(STORY, FREE)
    text = next(chunks).text
    other_generation_is_refused(engine)
    text += next(chunks).text
    other_generation_is_refused(engine)
    if end == "exhausted":
        assert text + "".join(c.text for c in chunks) == want.text
    elif end == "closed":
        chunks.close()
    else:
        del chunks
        gc.collect()
    assert outcome(engine.generate(STORY, FREE)) == outcome(want)
    assert "".join(c.text for c in engine.stream(STORY, FREE)) == want.text


def test_a_closed_stream_frees_the_engine_whoever_holds_it(device, monkeypatch):
    """Some Pythons keep the locals of a closed generator alive, and so the run that it reads."""
    want, engine, held = alone(device, STORY), engine_of(device), []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda requests: held.append(run(requests)) or held[-1])
    chunks = engine.stream(STORY, FREE)
    next(chunks)
    chunks.close()
    assert outcome(engine.generate(STORY, FREE)) == outcome(want)
    assert len(held) == 2


def test_a_stream_that_nobody_reads_takes_nothing(device):
    engine = engine_of(device)
    unread = engine.stream(STORY, FREE)
    del unread
    assert outcome(engine.generate(STORY, FREE)) == outcome(alone(device, STORY))
    finished = engine.stream(STORY, replace(FREE, max_tokens=2))
    assert len(list(finished)) == 2
    assert outcome(engine.generate(STORY, FREE)) == outcome(alone(device, STORY))


@pytest.mark.parametrize("kind", ["none", "ngram"])
def test_a_failed_call_leaves_the_engine_usable(kind, device):
    engine = engine_of_kind(kind, device, batch=2, cuda_graphs=False)
    want = alone(device, STORY)
    vocab, logits = engine.config.vocab, engine.model.logits
    for bad in ([vocab], [], [1.5], [1] * CONTEXT):
        with pytest.raises(Exception, match="prompt"):
            engine.generate([STORY, CODE, bad], FREE)
        assert outcome(engine.generate(STORY, FREE)) == outcome(want)
    rounds = []

    def spoilt(hidden):
        rounds.append(1)
        return logits(hidden) * (float("nan") if len(rounds) > 2 else 1)

    for call in (
        lambda: engine.generate([CODE, STORY, LISTING], FREE),
        lambda: list(engine.stream(CODE, FREE)),
    ):
        rounds.clear()
        try:
            engine.model.logits = spoilt
            with pytest.raises(NumericsError) as error:
                call()
        finally:
            del engine.model.logits
        assert error.value.step == 2
        assert not engine.state.active.any()
        assert outcome(engine.generate(STORY, FREE)) == outcome(want)
        several = engine.generate([LISTING, STORY], FREE)
        assert [outcome(r) for r in several] == [outcome(alone(device, LISTING)), outcome(want)]


def test_an_interrupted_call_leaves_the_engine_usable(device):
    """Whatever comes out of a round, as a user's Ctrl-C does."""
    engine = engine_of(device, "ngram", 2, cuda_graphs=False)

    def interrupt(hidden):
        raise KeyboardInterrupt

    try:
        engine.model.logits = interrupt
        with pytest.raises(KeyboardInterrupt):
            engine.generate([CODE, LISTING, STORY], FREE)
    finally:
        del engine.model.logits
    assert not engine.state.active.any()
    assert outcome(engine.generate(STORY, FREE)) == outcome(alone(device, STORY))


def test_stream_takes_one_prompt_and_gives_one_completion(device):
    engine = engine_of(device)
    for prompt, params in [(STORY, replace(FREE, n=2)), ([STORY], FREE), ([STORY, CODE], FREE)]:
        with pytest.raises(ValueError, match="one"):
            list(engine.stream(prompt, params))
    assert outcome(engine.generate(STORY, FREE)) == outcome(alone(device, STORY))


def test_chunks_of_a_long_prompt(device, monkeypatch):
    """A prompt of 600 tokens has the same continuation however it is cut."""
    rng = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(2, 8192, (600,), generator=rng).tolist())
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=2, ignore_eos=True, logprobs=3)
    want = alone(device, prompt, params)
    for rows in (64, 1000):
        monkeypatch.setitem(PREFILL, device.type, rows)
        assert outcome(engine_of(device).generate(prompt, params)) == outcome(want)
        engine = engine_of_kind("noisy", device, truth_of(want))
        assert outcome(engine.generate(prompt, params)) == outcome(want)
    monkeypatch.undo()
    engine = engine_of_kind("noisy", device, truth_of(want))
    assert outcome(engine.generate(prompt, params)) == outcome(want)
