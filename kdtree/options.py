"""The engine's arguments, checked: what is wrong, what is wanted, and both values."""

from dataclasses import replace
from pathlib import Path

import torch

from kdtree.cache import check_fp8
from kdtree.checks import is_whole, shown, whole
from kdtree.config import ModelConfig
from kdtree.costs import Costs
from kdtree.drafters import DRAFTERS, DrafterConfig
from kdtree.errors import CapacityError, ConfigError
from kdtree.outputs import Result
from kdtree.request import Request
from kdtree.sampling import SamplingParams
from kdtree.state import State
from kdtree.text import TOKENIZERS, ChatTemplate, Tokenizer
from kdtree.tree import MAX_NODES

DEMO = Path(__file__).parent / "demo"
CONTEXT = 32768  # tokens of context where the caller names none, if the model has as many

Prompt = str | list[int]


def directory(model: str | Path | None) -> Path:
    """The model directory; the demo model that ships with the package where none is named."""
    if not isinstance(model, str | Path | None):
        raise TypeError(f"model is {model!r}, wants a directory")
    path = DEMO if model is None else Path(model)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory: a model is a directory with a config.json")
    return path


def device(name: str) -> torch.device:
    if not isinstance(name, str | torch.device):
        raise TypeError(f"device is {shown(name)}, wants 'auto', 'cpu' or 'cuda'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, index = str(name).partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (index.isascii() and index.isdigit())):
        raise ValueError(f"device is {shown(name)}, wants 'auto', 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {shown(name)}, but torch finds no CUDA device")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    index = index.lstrip("0") or "0"  # torch would take a large one modulo 256
    if len(index) > 3 or int(index) >= count:
        raise ValueError(f"device is {shown(name)}, wants an index below {count}")
    return torch.device(kind, int(index)) if colon else torch.device(kind)


def dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"dtype is {name!r}, wants 'auto', 'float32' or 'bfloat16'")
    return names[name]


def quantize(name: str | None) -> str | None:
    if name is not None and name != "int4":
        raise ValueError(f"quantize is {name!r}, wants None or 'int4'")
    return name


def fp8_cache(name: str, config: ModelConfig) -> bool:
    """Whether latents are cached in FP8, by kv_cache_dtype."""
    if name not in ("auto", "fp8"):
        raise ValueError(f"kv_cache_dtype is {shown(name)}, wants 'auto' or 'fp8'")
    if name == "fp8":
        check_fp8(config)
    return name == "fp8"


def batch(sequences: int) -> int:
    if not is_whole(sequences) or sequences < 1:
        raise ValueError(f"max_batch is {shown(sequences)}, wants an integer of at least 1")
    return sequences


def budget(nodes: int | str | Costs) -> int | None:
    """Draft nodes a round; None for as many as pay, up to the drafter's own choice."""
    if nodes == "auto" or isinstance(nodes, Costs):
        return None
    if not is_whole(nodes) or not 0 <= nodes < MAX_NODES:
        wanted = f"'auto', Costs or 0 to {MAX_NODES - 1}"
        raise ValueError(f"budget is {shown(nodes)}, wants {wanted}")
    return nodes


def is_chain(tree: str) -> bool:
    if tree not in ("best-first", "chain"):
        raise ValueError(f"tree is {shown(tree)}, wants 'best-first' or 'chain'")
    return tree == "chain"


def drafter(wanted: str | DrafterConfig) -> DrafterConfig:
    if not isinstance(wanted, str):
        if isinstance(wanted, type) or not isinstance(wanted, DrafterConfig):
            raise TypeError(f"drafter is {wanted!r}, wants a name or a drafter's config")
        return wanted
    if wanted not in DRAFTERS:
        raise ConfigError(f"drafter is {wanted!r}, supported: {', '.join(sorted(DRAFTERS))}")
    return DRAFTERS[wanted]()


def context(asked: int | None, config: ModelConfig) -> int:
    """Tokens of a sequence, prompt and continuation together."""
    if asked is None:
        return min(config.max_positions, CONTEXT)
    if not is_whole(asked) or asked < 2:
        raise ValueError(f"max_seq_len is {shown(asked)}, wants an integer of at least 2")
    if asked > config.max_positions:
        raise CapacityError(f"max_seq_len is {shown(asked)}, the model has {config.max_positions}")
    return asked


def prompts(
    given: Prompt | list[Prompt], params: SamplingParams | list[SamplingParams] | None
) -> tuple[list[Prompt], list[SamplingParams], bool]:
    """The prompts and the parameters of each, and whether it was a single one."""
    single = isinstance(given, str) or _is_ids(given)
    if not single and not isinstance(given, list | tuple):
        raise TypeError(f"prompts is a {type(given).__name__}, wants text, token ids or a list")
    several = [given] if single else list(given)
    for prompt in several:
        if not isinstance(prompt, str | list | tuple):
            raise TypeError(f"prompts holds {prompt!r}, wants text or lists of token ids")
    params = SamplingParams() if params is None else params
    each = list(params) if isinstance(params, list | tuple) else [params] * len(several)
    for one in each:
        if not isinstance(one, SamplingParams):
            raise TypeError(f"params holds a {type(one).__name__}, wants SamplingParams")
    if len(each) != len(several):
        raise ValueError(f"params has {len(each)} entries for {len(several)} prompts")
    return several, each, single


def conversations(given: list) -> tuple[list, bool]:
    """The conversations, and whether it was a single one: a list of messages."""
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"messages is {given!r}, wants a list of messages or of such lists")
    several = [isinstance(each, list | tuple) for each in given]
    if len(set(several)) > 1:
        other = several.index(not several[0])
        kinds = "a list of messages", "a message"
        first, second = kinds if several[0] else kinds[::-1]
        raise TypeError(
            f"messages holds {first} at 0 and {second} at {other}, wants messages, which are one "
            "conversation, or lists of them, one for each"
        )
    single = not several[0]
    return [given] if single else list(given), single


def requests(
    prompts: list[Prompt],
    params: list[SamplingParams],
    trace: bool,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    state: State,
) -> tuple[list[Result], list[Request]]:
    """The results to be filled, and a request for each of their completions."""
    results, requests = [], []
    for prompt, p in zip(prompts, params, strict=True):
        text = prompt if isinstance(prompt, str) else None
        ids = encode(prompt, tokenizer, config.vocab)
        if p.stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model has none")
        eos = () if p.ignore_eos else config.eos_ids
        for token in p.stop_token_ids:
            whole("stop_token_ids", token, 0, config.vocab - 1)
        stop = list(dict.fromkeys((*eos, *p.stop_token_ids)))
        state.check(ids, stop)
        own = [
            Request(
                number=len(requests) + i,
                index=i,
                prompt=ids,
                params=replace(p, seed=p.seed + i, n=1),
                stop=stop,
                tokenizer=tokenizer,
                trace=trace,
            )
            for i in range(p.n)
        ]
        requests += own
        results.append(Result(text, ids, [r.completion for r in own]))
    return results, requests


def template(found: ChatTemplate | None) -> ChatTemplate:
    """The model's chat template, which it must have."""
    if found is None:
        raise ValueError(
            "the model has no chat template: its directory wants a tokenizer, and "
            "chat_template.jinja or a chat_template in tokenizer_config.json; "
            "generate continues text as it is"
        )
    return found


def encode(prompt: Prompt, tokenizer: Tokenizer | None, vocab: int) -> list[int]:
    """A prompt's token ids."""
    if not isinstance(prompt, str):
        return prompt_ids(prompt, vocab)
    if tokenizer is None:
        raise ValueError(
            "the prompt is text, and the model directory has neither of the supported "
            f"tokenizers: {TOKENIZERS}"
        )
    return prompt_ids(tokenizer.encode(prompt), vocab)


def prompt_ids(ids: list[int], vocab: int) -> list[int]:
    if not ids:
        raise ValueError("the prompt is empty: there is no token to continue")
    for token in ids:
        if not is_whole(token):
            raise TypeError(f"the prompt holds {token!r}, wants token ids")
        if not 0 <= token < vocab:
            raise ValueError(f"the prompt holds token {shown(token)}, the vocabulary has {vocab}")
    return list(ids)


def _is_ids(given: object) -> bool:
    """A list of ids is one prompt; an empty list is no prompts."""
    if not isinstance(given, list | tuple) or not given:
        return False
    return not isinstance(given[0], str | list | tuple)
