"""Stop strings end a text where plain reading would, whatever a round accepts."""

from dataclasses import replace

import pytest
import torch
from demo_engine import (
    FREE,
    KINDS,
    STORY,
    TEXTS,
    alone,
    engine_of,
    engine_of_kind,
    outcome,
    truth_of,
    whole_characters,
)

from kdtree import SamplingParams


def where_it_stops(engine, ids, stops):
    """Tokens, text and stop string of a run that stops at the first string that is complete."""
    for n in range(1, len(ids) + 1):
        text = whole_characters(engine, ids[:n])
        ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
        if ends:
            _, start, stop = min(ends)
            return ids[:n], text[:start], stop
    return ids, engine.tokenizer.decode(ids), None


def assert_stops(engine, prompt, free, stops, params=FREE):
    ids, text, stop = where_it_stops(engine, free.token_ids, stops)
    got = engine.generate(prompt, replace(params, stop=stops))
    reason = "length" if stop is None else "stop"
    assert (got.text, got.token_ids) == (text, ids), stops
    assert (got.finish_reason, got.stop_reason) == (reason, stop), stops
    assert got.metrics.tokens == sum(i * n for i, n in enumerate(got.metrics.histogram)) == len(ids)
    return got


@pytest.mark.parametrize("kind", ["none", "chain", "noisy"])
@pytest.mark.parametrize("name", TEXTS)
def test_stop_string_at_any_place(name, kind, device):
    """Inside an accepted run, at its ends, and begun in one round and complete in the next."""
    prompt, free = TEXTS[name], alone(device, TEXTS[name])
    engine = engine_of_kind(kind, device, truth_of(free))
    text, ids = free.text, free.token_ids
    assert "\ufffd" not in text

    def round_of(end):
        """The round of the chain, and the place in it, of the token that completes text[:end]."""
        n = next(n for n in range(len(ids) + 1) if len(whole_characters(engine, ids[:n])) >= end)
        return divmod(n - 1, 7)

    straddling = inside = 0
    for length in (1, 4, 13):
        for start in range(0, len(text) - length, len(text) // 9):
            got = assert_stops(engine, prompt, free, (text[start : start + length],))
            assert got.text == text[: text.index(text[start : start + length])]
            first, last = round_of(len(got.text) + 1), round_of(len(got.text) + length)
            straddling += first[0] < last[0]
            inside += last[1] < 6
    assert straddling >= 2 and inside >= 2


@pytest.mark.parametrize("kind", ["none", "chain", "noisy"])
def test_first_of_several_stop_strings(kind, device):
    """The first to be complete, not the first to begin; of two that end together, the longer."""
    free = alone(device, STORY)
    engine, text = engine_of_kind(kind, device, truth_of(free)), free.text
    assert len(set(text)) > 10
    early, late = text[12:15], text[40:44]
    pieces = [engine.tokenizer.decode([id]) for id in free.token_ids]
    n = next(n for n in range(1, len(pieces)) if len(pieces[n]) > 4)
    same_token = pieces[n - 1] + pieces[n], pieces[n][:3]  # the second is complete before the first
    around, within = text[3:30], text[9:16]
    longer, shorter = text[20:31], text[26:31]
    for stops in [(early, late), (around, within), (longer, shorter), same_token, ("\0", late)]:
        got = assert_stops(engine, STORY, free, stops)
        assert outcome(engine.generate(STORY, replace(FREE, stop=stops[::-1]))) == outcome(got)
    assert assert_stops(engine, STORY, free, (around, within)).stop_reason == within
    assert assert_stops(engine, STORY, free, (shorter, longer)).stop_reason == longer


@pytest.mark.parametrize("kind", KINDS)
def test_stop_string_that_never_occurs(kind, device):
    """Nothing changes, although some of its beginning was held back."""
    free = alone(device, STORY)
    engine = engine_of_kind(kind, device, truth_of(free))
    end = free.text[-6:] + "\0"
    for stops in ("\0",), (end,), (free.text + "\0", free.text[3:9] + "\0", end):
        assert outcome(engine.generate(STORY, replace(FREE, stop=stops))) == outcome(free)
        chunks = engine.stream(STORY, replace(FREE, stop=stops))
        assert "".join(c.text for c in chunks) == free.text


@pytest.mark.parametrize("kind", ["none", "chain"])
def test_stop_string_beside_other_ends(kind, device):
    """A stop token before it, in it and after it; the limit at its last token and before that."""
    free = alone(device, STORY)
    engine = engine_of_kind(kind, device, truth_of(free))
    ids = free.token_ids
    n = next(n for n in range(3, 9) if ids[n] not in ids[:n] and ids[n + 1] not in ids[: n + 1])
    text = engine.tokenizer.decode
    stop = text(ids[n - 1 : n + 1])  # two tokens
    assert text(ids).index(stop) == len(text(ids[: n - 1]))

    def run(**params):
        got = engine.generate(STORY, replace(FREE, stop=(stop,), **params))
        return len(got.token_ids), got.text, got.finish_reason, got.stop_reason

    before = text(ids[: n - 1])
    assert run(stop_token_ids=(ids[n + 1],)) == (n + 1, before, "stop", stop)
    assert run(stop_token_ids=(ids[n],)) == (n + 1, text(ids[:n]), "stop", ids[n])
    assert run(max_tokens=n + 1) == (n + 1, before, "stop", stop)
    assert run(max_tokens=n) == (n, text(ids[:n]), "length", None)


def test_end_of_sequence_has_no_stop_reason(device):
    """Where the model's own end is drawn; it is the last token, and no text."""
    engine = engine_of(device, cuda_graphs=False)
    eos = engine.config.eos_ids[0]
    free = alone(device, STORY).token_ids
    logits = engine.model.logits
    try:
        engine.model.logits = lambda hidden: logits(hidden).index_fill(
            2, torch.tensor([eos], device=device), 1e4
        )
        got = engine.generate(STORY, SamplingParams(max_tokens=3))
        ignored = engine.generate(STORY, SamplingParams(max_tokens=3, ignore_eos=True))
        asked = engine.generate(STORY, SamplingParams(max_tokens=3, stop_token_ids=(eos,)))
        late = engine.generate(STORY, SamplingParams(max_tokens=6, min_tokens=4))
    finally:
        del engine.model.logits
    assert (got.token_ids, got.text) == ([eos], "")
    assert (got.finish_reason, got.stop_reason) == ("stop", None)
    assert (ignored.token_ids, ignored.finish_reason) == ([eos] * 3, "length")
    assert (asked.finish_reason, asked.stop_reason) == ("stop", eos)
    assert late.token_ids == [*free[:4], eos]
