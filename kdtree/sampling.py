"""How one prompt is to be continued, as the caller says it, and checked here once."""

from dataclasses import dataclass

from kdtree.checks import flag, real, whole

MAX_LOGPROBS = 64  # of ops.top_logprobs


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one generation, named as in vLLM. Sampling: design of `kdtree.ops.sample`.

    max_tokens: tokens to emit at most; None for the end of the context
    temperature: 0 is argmax, the default; so is what is below 1e-30
    top_k: candidates kept, 0 for all; top_p: mass kept, in (0, 1]; min_p: least probability kept,
        relative to the best token's, in [0, 1)
    seed: of the noise; completion i of n uses seed + i
    n: completions of the prompt
    stop: strings that end the text, which excludes them; stop_token_ids: tokens that end it
    ignore_eos: do not stop at the model's end-of-sequence tokens
    min_tokens: tokens to emit before a stop token may be drawn; they are masked until then
    logprobs: how many of the best tokens to report with each token; None for none
    Raises ValueError or TypeError on values outside these ranges.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _several("stop", stop, "strings"))
        ids = _several("stop_token_ids", self.stop_token_ids, "token ids")
        object.__setattr__(self, "stop_token_ids", ids)
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, 1, None)
        real("temperature", self.temperature, "at least 0", lambda v: v >= 0)
        whole("top_k", self.top_k, 0, 2**31 - 1)
        real("top_p", self.top_p, "in (0, 1]", lambda v: 0 < v <= 1)
        real("min_p", self.min_p, "in [0, 1)", lambda v: 0 <= v < 1)
        whole("seed", self.seed, -(2**63), 2**63 - 1)
        whole("n", self.n, 1, 2**63 - self.seed)  # the last seed is seed + n - 1
        flag("ignore_eos", self.ignore_eos)
        whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        for token in self.stop_token_ids:
            whole("stop_token_ids", token, 0, None)
        for text in self.stop:
            if not isinstance(text, str):
                raise TypeError(f"stop holds {text!r}, wants strings")
            if not text:
                raise ValueError("stop holds an empty string, which would stop everywhere")
        if self.logprobs is not None:
            whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)


def _several(name: str, value: object, wants: str) -> tuple:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name} is {value!r}, wants a list of {wants}")
    return tuple(value)
