"""The loop: draft trees return what plain decoding returns, bit for bit, for any drafter."""

import random
from dataclasses import dataclass

import pytest
import torch
from fp8_rows import POISON
from scored import ScoredConfig
from variants import variant

from kdtree import Engine, NgramConfig, NumericsError, OracleConfig, SamplingParams
from kdtree.drafters.base import Stateless, grow

DTYPES = ["float32", "bfloat16"]
VARIANTS = ["base", "dims", "one-layer", "groups", "yarn", "int4", "vocab-odd", "q-lora-none"]
MAX_SEQ_LEN = 200


@dataclass(frozen=True)
class GarbageConfig:
    """A drafter that knows nothing: tokens and scores by a fixed generator, some not finite."""

    depth: int = 6
    candidates: int = 5

    def create(self, setup):
        return Garbage(self, setup)


class Garbage(Stateless):
    def __init__(self, config, setup):
        self.config, self.setup = config, setup
        self.nodes = 1 + (5 if setup.budget is None else setup.budget)
        self.generator = torch.Generator().manual_seed(0)

    def plan(self, state):
        return None  # it asks the host

    def propose(self, state):
        c, device = self.config, self.setup.device
        shape = (self.setup.sequences, c.depth, c.candidates)
        score = torch.randn(shape, generator=self.generator)
        score[score > 1.5] = float("nan")
        token = torch.randint(self.setup.vocab, shape, generator=self.generator)
        return grow(state, score.to(device), token.to(device), self.nodes, self.setup)


def engine_of(name, device, dtype, drafter="none", batch=1, **options) -> Engine:
    engine = Engine(
        variant(name),
        drafter=drafter,
        device=str(device),
        dtype=dtype,
        max_seq_len=MAX_SEQ_LEN,
        max_batch=batch,
        **options,
    )
    poison(engine)
    return engine


def poison(engine: Engine) -> None:
    """What a round reads without having written it shows."""
    engine.cache.data.fill_(float("nan") if engine.cache.data.is_floating_point() else POISON)


def shuffle_pages(engine: Engine, rng: random.Random) -> None:
    pages = list(range(engine.cache.block_table.numel()))
    rng.shuffle(pages)
    table = torch.tensor(pages, dtype=torch.int32).view(engine.cache.block_table.shape)
    engine.cache.block_table.copy_(table)


def latents(engine: Engine, b: int, tokens: int) -> torch.Tensor:
    """[L, tokens, width]: sequence b's committed rows, in order of position."""
    rows = engine.cache.data[:, engine.cache.block_table[b].long()].flatten(1, 2)
    return rows[:, :tokens].clone()


def random_params(rng: random.Random, vocab: int, greedy: bool) -> SamplingParams:
    most = rng.randint(1, 40)
    return SamplingParams(
        max_tokens=most,
        temperature=0.0 if greedy else rng.choice([0.3, 0.8, 1.0, 1.7]),
        top_k=0 if greedy else rng.choice([0, 0, 5, 50]),
        top_p=1.0 if greedy else rng.choice([1.0, 0.9, 0.5]),
        min_p=0.0 if greedy else rng.choice([0.0, 0.05]),
        seed=rng.randrange(2**40),
        stop_token_ids=tuple(rng.sample(range(vocab), rng.choice([0, 0, 10]))),
        min_tokens=rng.choice([0, 0, rng.randint(0, most)]),
        logprobs=rng.choice([None, 0, 3]),
    )


@dataclass(frozen=True)
class Case:
    """One random way to continue some prompts."""

    number: int

    def __post_init__(self):
        rng = random.Random(self.number)
        vocab = 331  # the smallest of the variants
        batch = rng.randint(1, 4)
        period = rng.choice([3, 7, 1000])  # repetition for the prompt look-up to find
        lengths = [rng.choice([1, 2, 15, 17, 40, 65, 90]) for _ in range(batch + rng.randint(0, 2))]
        texts = [[rng.randrange(vocab) for _ in range(min(period, n))] for n in lengths]
        greedy = rng.random() < 0.4
        values = {
            "rng": rng,
            "name": VARIANTS[self.number % len(VARIANTS)],
            "batch": batch,
            "budget": rng.choice([1, 2, 3, 7, 15, 31, 63, rng.randint(1, 63)]),
            "depth": rng.randint(1, 15),
            "prompts": [(t * n)[:n] for t, n in zip(texts, lengths, strict=True)],
            "params": [random_params(rng, vocab, greedy) for _ in lengths],
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def drafters(self, truth):
        c = {"depth": self.depth, "seed": self.number}
        truth = tuple(map(tuple, truth))
        return {
            "none": "none",
            "oracle": OracleConfig(truth, 1.0, **c),
            "noisy": OracleConfig(truth, 0.5, self.number % 6 + 1, **c),
            "wrong": OracleConfig(truth, 0.0, 3, **c),
            "ngram": NgramConfig(depth=self.depth, matches=self.number % 4 + 1),
            "garbage": GarbageConfig(self.depth),
            "scored": ScoredConfig(truth, self.depth, edges=self.number % 2 == 0, spoilt=0.1),
        }


def outcome(result):
    """Everything that must not depend on the drafter; equality of floats is of bits."""
    return [
        (c.token_ids, c.finish_reason, c.stop_reason, c.logprobs)
        for r in result
        for c in r.completions
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", range(24))
def test_trees_return_what_autoregression_returns(number, dtype, device):
    check_trees(Case(number), dtype, device)


def check_trees(case: Case, dtype, device, **options):
    plain = engine_of(case.name, device, dtype, **options)
    want = plain.generate(case.prompts, case.params)
    truth = [r.prompt_token_ids + r.token_ids for r in want]
    rounds = {}
    for name, drafter in case.drafters(truth).items():
        tree = case.rng.choice(["best-first", "best-first", "chain"])
        engine = engine_of(
            case.name,
            device,
            dtype,
            drafter,
            case.batch,
            budget="auto" if drafter == "none" else case.budget,
            tree=tree,
            chain_seed=name == "oracle" or case.rng.random() < 0.3,
            **options,
        )
        shuffle_pages(engine, case.rng)
        got = engine.generate(case.prompts, case.params)
        assert outcome(got) == outcome(want), name
        rounds[name] = sum(r.metrics.rounds for r in got)
    least = sum(-(-len(r.token_ids) // (min(case.depth, case.budget) + 1)) for r in want)
    assert rounds["oracle"] == least


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accuracy", [1.0, 0.6])
def test_cache_after_compaction_is_that_from_scratch(accuracy, dtype, device):
    check_cache(accuracy, dtype, device)


def check_cache(accuracy, dtype, device, **options):
    """Committed rows have the bits of plain decoding, and of a prefill of the same tokens."""
    prompt, params = [5, 9, 2, 77, 31] * 5, SamplingParams(max_tokens=100, ignore_eos=True)
    plain = engine_of("base", device, dtype, **options)
    want = plain.generate(prompt, params)
    truth = prompt + want.token_ids
    drafter = OracleConfig((tuple(truth),), accuracy, depth=9)
    engine = engine_of("base", device, dtype, drafter, budget=17, **options)
    got = engine.generate(prompt, params)
    assert got.token_ids == want.token_ids
    assert got.metrics.acceptance_length > 2
    committed = len(truth) - 1
    assert torch.equal(latents(engine, 0, committed), latents(plain, 0, committed))
    poison(plain)
    plain.generate(truth, SamplingParams(max_tokens=1))
    assert torch.equal(latents(engine, 0, committed), latents(plain, 0, committed))


def test_a_sequence_does_not_depend_on_its_batch(device):
    """Each prompt alone, and among others, by other numbers of sequences."""
    rng = random.Random(3)
    prompts = [[rng.randrange(331) for _ in range(rng.randint(1, 80))] for _ in range(7)]
    params = [SamplingParams(max_tokens=rng.randint(1, 30), temperature=1.0, seed=i, logprobs=0)
              for i in range(7)]  # fmt: skip
    alone = engine_of("base", device, "float32")
    want = [outcome([alone.generate(p, s)]) for p, s in zip(prompts, params, strict=True)]
    for batch in (2, 3, 7):
        engine = engine_of("base", device, "float32", "ngram", batch)
        got = engine.generate(prompts, params)
        assert [outcome([r]) for r in got] == want


def test_same_seed_same_tokens_other_seed_others(device):
    engine = engine_of("base", device, "float32", batch=2)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=7, n=4, ignore_eos=True)
    first = engine.generate([1, 2, 3], params)
    again = engine.generate([1, 2, 3], params)
    assert outcome([first]) == outcome([again])
    tokens = [tuple(c.token_ids) for c in first.completions]
    assert len(set(tokens)) == 4
    seeded = engine.generate([1, 2, 3], SamplingParams(max_tokens=20, temperature=1.0, seed=9))
    assert tuple(seeded.token_ids) == tokens[2][: len(seeded.token_ids)]


@pytest.mark.parametrize("where", range(1, 9))
@pytest.mark.parametrize("cap", [3, 5, 8, 20])
def test_first_stop_then_cap(where, cap, device):
    """A stop token at every place of an accepted run, with the length cap around it."""
    plain = engine_of("base", device, "float32")
    free = plain.generate([4, 8, 15], SamplingParams(max_tokens=20, ignore_eos=True)).token_ids
    stop = free[where]
    first = free.index(stop) + 1
    drafter = OracleConfig(((4, 8, 15, *free),), depth=12)
    engine = engine_of("base", device, "float32", drafter, budget=12)
    params = SamplingParams(max_tokens=cap, stop_token_ids=(stop,), ignore_eos=True)
    got = engine.generate([4, 8, 15], params)
    if first <= cap:
        assert (got.token_ids, got.finish_reason, got.stop_reason) == (free[:first], "stop", stop)
    else:
        assert (got.token_ids, got.finish_reason) == (free[:cap], "length")
    assert (
        got.metrics.tokens
        == len(got.token_ids)
        == sum(i * n for i, n in enumerate(got.metrics.histogram))
    )


def test_ends_of_the_context(device):
    engine = engine_of("base", device, "float32", "ngram", budget=63)
    for length in (1, 2, 100, MAX_SEQ_LEN - 1):
        got = engine.generate([3] * length, SamplingParams(ignore_eos=True))
        assert len(got.token_ids) == MAX_SEQ_LEN - length
        assert got.finish_reason == "length"


def test_min_tokens_masks_stop_tokens(device):
    plain = engine_of("base", device, "float32")
    free = plain.generate([4, 8, 15], SamplingParams(max_tokens=20, ignore_eos=True)).token_ids
    params = SamplingParams(max_tokens=20, stop_token_ids=(free[2],), min_tokens=10,
                            ignore_eos=True, logprobs=2)  # fmt: skip
    want = plain.generate([4, 8, 15], params)
    assert free[2] not in want.token_ids[:10]
    engine = engine_of("base", device, "float32", GarbageConfig(), budget=9)
    assert outcome([engine.generate([4, 8, 15], params)]) == outcome([want])
    # log-probabilities are of the raw logits
    assert free[2] == max(want.logprobs[2], key=want.logprobs[2].get)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_raise(bad, device):
    engine = engine_of("base", device, "float32")
    free = engine.generate([1, 2], SamplingParams(max_tokens=12, ignore_eos=True)).token_ids
    fresh = next(i for i, token in enumerate(free) if token not in free[:i] and i > 3)
    drafter = OracleConfig(((1, 2, *free),), depth=15)
    engine = engine_of("base", device, "float32", drafter, budget=15)
    engine.model.embed_tokens[free[fresh]] = bad  # the row after that token is spoilt
    with pytest.raises(NumericsError) as error:
        engine.generate([1, 2], SamplingParams(max_tokens=12, ignore_eos=True))
    assert error.value.position == 2 + fresh + 1
    got = engine.generate([1, 2], SamplingParams(max_tokens=fresh, ignore_eos=True))
    assert got.token_ids == free[:fresh]  # the engine goes on, and a spoilt branch raises nothing
