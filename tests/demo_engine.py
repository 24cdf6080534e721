"""The demo model's engines, by drafter, and what it says without one."""

import functools
from dataclasses import replace

from kdtree import Engine, OracleConfig, SamplingParams

LISTING = "├── src\n├── lib\n├── a\n" * 2  # the model goes on with it; its ├ takes two tokens
STORY = "Once upon a time"
CODE = "import os\nimport sys\n\n\ndef main("
TEXTS = {"listing": LISTING, "story": STORY}
FREE = SamplingParams(max_tokens=22, ignore_eos=True)
KINDS = ["none", "chain", "noisy", "ngram"]
CONTEXT = 720
SAMPLED = SamplingParams(max_tokens=15, temperature=1.0, seed=3, logprobs=2)
CHAIN = OracleConfig((), depth=6, budget=6)  # right in all its tokens, 7 a round
NOISY = OracleConfig((), 0.5, 3, 9, budget=20)  # a tree that is right half of the time


@functools.cache
def engine_of(device, drafter="none", batch=1, cuda_graphs=True) -> Engine:
    """The demo model, loaded once for all tests: each leaves it as it was.

    cuda_graphs: False for a test that changes what a round does, which a graph would not know
    """
    tree = "chain" if drafter == CHAIN else "best-first"
    budget = "auto" if drafter == "none" else 7  # trees whatever they cost
    return Engine(
        drafter=drafter,
        tree=tree,
        budget=budget,
        device=str(device),
        max_seq_len=CONTEXT,
        max_batch=batch,
        cuda_graphs=cuda_graphs,
    )


def engine_of_kind(kind, device, truth=(), batch=1, cuda_graphs=True) -> Engine:
    """truth: of each completion of the next call, for the kinds that are told it"""
    if kind not in ("chain", "noisy"):
        return engine_of(device, kind, batch, cuda_graphs)
    engine = engine_of(device, CHAIN if kind == "chain" else NOISY, batch)
    oracle = engine.drafter
    oracle.config = replace(oracle.config, truth=tuple(map(tuple, truth)))
    return engine


@functools.cache
def alone(device, prompt, params=FREE):
    """The result of plain decoding of one prompt."""
    return engine_of(device).generate(prompt, params)


def truth_of(*results) -> list[list[int]]:
    return [r.prompt_token_ids + c.token_ids for r in results for c in r.completions]


def outcome(result):
    """What must not depend on drafter and neighbours; equality of floats is of bits."""
    return [
        (c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs)
        for c in result.completions
    ]


def whole_characters(engine, ids) -> str:
    """The text of the tokens, less a character that they end inside of."""
    return engine.tokenizer.decode(ids).rstrip("\ufffd")
