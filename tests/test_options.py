"""A caller's mistakes: each raises, and says what is wrong and what is wanted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from says import says
from variants import variant

from kdtree import Engine, NgramConfig, OracleConfig, SamplingParams
from kdtree.errors import CapacityError, ConfigError
from kdtree.sampling import MAX_LOGPROBS

NAN = float("nan")
LITTLE = {"max_tokens": 2}
CONTEXT = 24


@pytest.fixture(scope="module")
def small() -> tuple[Engine, list[int]]:
    """A model without a tokenizer, and what it says."""
    made = Engine(variant("vocab-odd"), device="cpu", max_seq_len=CONTEXT)
    return made, made.generate([3, 1, 4], SamplingParams(max_tokens=5)).token_ids


@pytest.fixture
def engine(small):
    """After any mistake it says the same."""
    made, want = small
    yield made
    assert made.generate([3, 1, 4], SamplingParams(max_tokens=5)).token_ids == want


@pytest.fixture(scope="module")
def demo():
    """With a tokenizer that puts no token before a text."""
    return Engine(device="cpu", max_seq_len=CONTEXT)


WRONG = (TypeError, ValueError)  # either name fits a thing of a wrong type


OPTIONS = [
    ({"device": "tpu"}, ValueError, ["device", "tpu", "wants", "cpu"]),
    ({"device": "meta"}, ValueError, ["device", "meta", "wants", "cpu"]),
    ({"device": "cpu:1"}, ValueError, ["device", "'cpu:1'", "wants an index below 1"]),
    ({"device": "cpu:256"}, ValueError, ["device", "'cpu:256'", "wants an index below 1"]),
    ({"device": "cuda:-1"}, ValueError, ["device", "'cuda:-1'", "wants", "cpu"]),
    ({"device": ""}, ValueError, ["device", "''", "wants", "cpu"]),
    ({"device": None}, WRONG, ["device", None, "wants", "cpu"]),
    ({"device": 1.5}, WRONG, ["device", 1.5, "wants", "cpu"]),
    ({"dtype": "float16"}, ValueError, ["dtype", "float16", "wants", "bfloat16"]),
    ({"dtype": torch.float16}, WRONG, ["dtype", "float16", "wants", "bfloat16"]),
    ({"dtype": None}, WRONG, ["dtype", None, "wants", "bfloat16"]),
    ({"kv_cache_dtype": "int8"}, ValueError, ["kv_cache_dtype", "int8", "wants", "auto", "fp8"]),
    ({"kv_cache_dtype": None}, WRONG, ["kv_cache_dtype", None, "wants", "auto", "fp8"]),
    ({"kv_cache_dtype": torch.uint8}, WRONG, ["kv_cache_dtype", "uint8", "wants", "fp8"]),
    ({"budget": -1}, ValueError, ["budget", -1, "wants", 63]),
    ({"budget": 64}, ValueError, ["budget", 64, "wants", 63]),
    ({"budget": True}, WRONG, ["budget", True, "wants"]),
    ({"budget": 2.0}, WRONG, ["budget", 2.0, "wants"]),
    ({"budget": "many"}, WRONG, ["budget", "many", "wants", "auto"]),
    ({"budget": None}, WRONG, ["budget", None, "wants", "auto"]),
    ({"budget": 3, "drafter": "none"}, ValueError, ["budget", 3, "none"]),
    ({"tree": "bushy"}, ValueError, ["tree", "bushy", "wants", "best-first", "chain"]),
    ({"tree": None}, WRONG, ["tree", None, "wants", "best-first", "chain"]),
    ({"tree": True}, WRONG, ["tree", True, "wants", "best-first", "chain"]),
    ({"chain_seed": 1}, TypeError, ["chain_seed", 1, "wants", "True"]),
    ({"chain_seed": None}, TypeError, ["chain_seed", None, "wants", "True"]),
    ({"chain_seed": "no"}, TypeError, ["chain_seed", "no", "wants", "True"]),
    ({"remeasure": 1}, TypeError, ["remeasure", 1, "wants", "True"]),
    ({"max_batch": 0}, ValueError, ["max_batch", 0, "wants", 1]),
    ({"max_batch": -3}, ValueError, ["max_batch", -3, "wants", 1]),
    ({"max_batch": True}, WRONG, ["max_batch", True, "wants", "integer"]),
    ({"max_batch": 2.0}, WRONG, ["max_batch", 2.0, "wants", "integer"]),
    ({"max_batch": "2"}, WRONG, ["max_batch", "'2'", "wants", "integer"]),
    ({"max_batch": None}, WRONG, ["max_batch", None, "wants", "integer"]),
    ({"max_seq_len": 1}, ValueError, ["max_seq_len", 1, "wants", 2]),
    ({"max_seq_len": -5}, ValueError, ["max_seq_len", -5, "wants", 2]),
    ({"max_seq_len": True}, WRONG, ["max_seq_len", True, "wants", "integer"]),
    ({"max_seq_len": 9.0}, WRONG, ["max_seq_len", 9.0, "wants", "integer"]),
    ({"max_seq_len": "9"}, WRONG, ["max_seq_len", "'9'", "wants", "integer"]),
    ({"drafter": "mtp"}, ConfigError, ["drafter", "mtp", "ngram", "none"]),
    ({"drafter": ""}, ConfigError, ["drafter", "''", "ngram", "none"]),
    ({"drafter": "oracle"}, (ConfigError, *WRONG), ["drafter", "oracle", "ngram", "none"]),
    ({"drafter": None}, TypeError, ["drafter", None, "wants", "config"]),
    ({"drafter": 7}, TypeError, ["drafter", 7, "wants", "config"]),
    ({"drafter": NgramConfig}, TypeError, ["drafter", "NgramConfig", "wants", "config"]),
    ({"drafter": object()}, TypeError, ["drafter", "object", "wants", "config"]),
    ({"drafter": NgramConfig(depth=0)}, ValueError, ["depth", 0, "wants", 1, 15]),
    ({"drafter": NgramConfig(depth=16)}, ValueError, ["depth", 16, "wants", 1, 15]),
    ({"drafter": NgramConfig(length=0)}, ValueError, ["length", "wants", 1]),
    ({"drafter": NgramConfig(matches=65)}, ValueError, ["matches", 64]),
    ({"drafter": OracleConfig((), depth=16)}, ValueError, ["depth", 16, "wants", 1, 15]),
    ({"drafter": OracleConfig((), 1.5)}, ValueError, ["accuracy", "wants", 0, 1]),
    ({"drafter": OracleConfig((), candidates=0)}, ValueError, ["candidates", 1, 64]),
]


IDS = [f"{i}-{next(iter(row[0]))}" for i, row in enumerate(OPTIONS)]


@pytest.mark.parametrize("options, error, parts", OPTIONS, ids=IDS)
def test_engine_options(options, error, parts):
    with says(error, *parts):
        Engine(variant("vocab-odd"), **{"device": "cpu", "max_seq_len": CONTEXT} | options)


def test_context_beyond_the_model(engine):
    most = engine.config.max_positions
    with says(CapacityError, "max_seq_len", most + 1, most):
        Engine(variant("vocab-odd"), device="cpu", max_seq_len=most + 1)
    assert Engine(variant("vocab-odd"), device="cpu", max_seq_len=most).max_seq_len == most


def test_cache_beyond_the_memory():
    with says(CapacityError, 10**9, "GiB", "free"):
        Engine(variant("vocab-odd"), device="cpu", max_seq_len=CONTEXT, max_batch=10**9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_no_cuda(name):
    with says(ValueError, "device", name, "CUDA"):
        Engine(device=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("name", ["cuda:99", "cuda:256", "cuda:999999999", "cuda:" + "9" * 5000])
def test_no_such_cuda_device(name):
    """torch takes an index modulo 256, and 256 for the current device."""
    with says(ValueError, "device", name[:7]):
        Engine(variant("vocab-odd"), device=name, max_seq_len=CONTEXT)


def test_no_model_directory(tmp_path):
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.write_text("{}")
    for path in (missing, file, str(missing)):
        with says(ConfigError, path, "not a directory", "config.json"):
            Engine(path)
    with says(ConfigError, tmp_path, "config.json"):
        Engine(tmp_path)
    for wrong in (7, b"demo", ["demo"]):
        with says(TypeError, "model", wrong, "wants"):
            Engine(wrong)


def test_limits_of_sampling_params(engine):
    """The last values that are allowed, and they work."""
    for params in (
        {"temperature": 0},
        {"temperature": 1e-30},
        {"temperature": 1e30},
        {"temperature": 1, "top_p": 1, "min_p": 0, "top_k": 2**31 - 1},
        {"temperature": 1.0, "top_p": 1e-30, "min_p": 0.999999},
        {"temperature": 1.0, "seed": 2**63 - 1},
        {"temperature": 1.0, "seed": -(2**63)},
        {"logprobs": MAX_LOGPROBS},
        {"min_tokens": 2, "stop_token_ids": [5]},
        {"max_tokens": None},
        {"max_tokens": 10**9},
    ):
        got = engine.generate([3, 1, 4], SamplingParams(**LITTLE | params))
        assert got.finish_reason in ("stop", "length")
    assert SamplingParams(stop="a b").stop == ("a b",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]) == SamplingParams(
        stop=("a", "b"), stop_token_ids=(1,)
    )


PROMPTS = [
    ("", ValueError, ["empty"]),
    ((), ValueError, ["empty"]),
    ([], ValueError, ["empty"]),
    ([-1], ValueError, ["-1", "vocabulary", 8192]),
    ([8192], ValueError, ["8192", "vocabulary", 8192]),
    ([1, 10**30], ValueError, [10**30, "vocabulary", 8192]),
    ([True], TypeError, [True, "token ids"]),
    ([1, False], TypeError, [False, "token ids"]),
    ([1.0], TypeError, [1.0, "token ids"]),
    ([3, NAN], TypeError, ["nan", "token ids"]),
    ([3, None], TypeError, [None, "token ids"]),
    ([3, "a"], TypeError, ["'a'", "token ids"]),
    ([3, [4]], TypeError, ["[4]", "token ids"]),
    (None, TypeError, ["prompts", "wants text", "token ids"]),
    (5, TypeError, ["prompts", "wants text", "token ids"]),
    (2.5, TypeError, ["prompts", "wants text", "token ids"]),
    (b"text", TypeError, ["prompts", "wants text", "token ids"]),
    ({"a": 1}, TypeError, ["prompts", "wants text", "token ids"]),
    ({3, 1}, TypeError, ["prompts", "wants text", "token ids"]),
    ("\ud800", ValueError, ["Unicode"]),
    ([1] * CONTEXT, CapacityError, [CONTEXT, CONTEXT]),
    ([1] * 31, CapacityError, [31, CONTEXT]),
    ("wide " * 40, CapacityError, [CONTEXT]),
]


@pytest.mark.parametrize(
    "prompt, error, parts", PROMPTS, ids=[repr(row[0])[:20] for row in PROMPTS]
)
def test_prompts(prompt, error, parts, demo):
    """Alone where a single one can be told from a list; as the second of a list always."""
    if prompt != [] and prompt != ():
        with says(error, *parts):
            demo.generate(prompt, SamplingParams(**LITTLE))
        with says(error, *parts):
            list(demo.stream(prompt, SamplingParams(**LITTLE)))
    with says(error, *parts):
        demo.generate([[5, 6], prompt], SamplingParams(**LITTLE))
    with says(error, *parts):
        demo.generate(["ab", prompt], SamplingParams(**LITTLE))


def test_a_prompt_that_just_fits(engine):
    got = engine.generate([1] * (CONTEXT - 1), SamplingParams(max_tokens=5, ignore_eos=True))
    assert (len(got.token_ids), got.finish_reason) == (1, "length")


def test_numbers_of_other_libraries(engine):
    """numpy's and torch's are no token ids, and it is said which one."""
    params = SamplingParams(**LITTLE)
    for wrong in (np.int64(5), np.float32(5), torch.tensor(5)):
        with says(TypeError, "prompt", 5, "token ids"):
            engine.generate([3, wrong], params)
    for wrong in (np.array([7, 1]), torch.tensor([7, 1])):
        with says(TypeError, "prompt", "token ids"):
            engine.generate(wrong, params)
        with says(TypeError, "prompt", "token ids"):
            engine.generate([[3], wrong], params)


@pytest.mark.parametrize(
    "prompts, count", [([3], 0), ([3], 2), ([[3], [4]], 1), ([[3], [4]], 3), ([], 1)]
)
def test_as_many_params_as_prompts(prompts, count, engine):
    several = 1 if prompts == [3] else len(prompts)
    with says(ValueError, "params", count, several):
        engine.generate(prompts, [SamplingParams(**LITTLE)] * count)


@pytest.mark.parametrize("wrong", [{"max_tokens": 2}, 2, "greedy", SamplingParams], ids=str)
def test_params_of_another_kind(wrong, engine):
    for params in (wrong, [wrong]):
        with says(TypeError, "params", "SamplingParams"):
            engine.generate([3], params)
    with says(TypeError, "params", "SamplingParams"):
        list(engine.stream([3], wrong))


def test_text_without_a_tokenizer(engine):
    params = SamplingParams(**LITTLE)
    for prompt in ("text", ["text"], [[3], "text"]):
        with says(ValueError, "text", "tokenizer"):
            engine.generate(prompt, params)
    with says(ValueError, "text", "tokenizer"):
        list(engine.stream("text", params))
    with says(ValueError, "stop", "tokenizer"):
        engine.generate([3], replace(params, stop="a"))
    with says(ValueError, "stop", "tokenizer"):
        engine.generate([[3], [4]], [params, replace(params, stop="a")])
    assert engine.generate([3], params).text == ""


def test_stop_tokens(engine):
    """At most 64 with the model's own, and each in the vocabulary."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    vocab = engine.config.vocab
    with says(CapacityError, 65, "stop tokens", 64):
        engine.generate([3], replace(params, stop_token_ids=tuple(range(65))))
    got = engine.generate([3], replace(params, stop_token_ids=tuple(range(64)), min_tokens=3))
    assert len(got.token_ids) == 3 and min(got.token_ids) >= 64
    for least in (0, 2):
        with says(ValueError, "stop_token_ids", vocab, "wants", vocab - 1):
            engine.generate([3], replace(params, stop_token_ids=(vocab,), min_tokens=least))


def test_seeds_of_all_completions(engine):
    """The last one's is in range too."""
    last = SamplingParams(max_tokens=1, temperature=1.0, seed=2**63 - 2, n=2)
    assert len(engine.generate([3], last).completions) == 2
    with says(ValueError, "n is 3", "wants", 2):
        replace(last, n=3)


def test_an_oracle_that_knows_something_else():
    engine = Engine(variant("vocab-odd"), drafter=OracleConfig(((3, 1, 4),)), device="cpu",
                    max_seq_len=CONTEXT)  # fmt: skip
    with says(ValueError, "truth 0", "prompt"):
        engine.generate([9], SamplingParams(**LITTLE))
    with says(ValueError, "knows 1", "number 1"):
        engine.generate([[3], [3]], SamplingParams(**LITTLE))
    assert len(engine.generate([3], SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2
