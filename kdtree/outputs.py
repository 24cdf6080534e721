"""What a generation returns."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Metrics:
    """Of one completion.

    rounds: decode forwards of the target; histogram[i]: rounds that emitted i tokens
    offered, accepted: for each depth from 1 on, rounds whose tree had a node so deep, and rounds
    in which one was accepted
    Seconds are of the wall clock from when the completion's turn came; where several run at once,
    decode_s is without what the others' prompts took meanwhile, ttft_s with it. phases are of all
    the call's rounds up to its end, on the device's clock; what is between rounds is in none.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    histogram: list[int] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted a round, the target's own included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """For each depth from 1 on: of the rounds that offered it, the share that accepted it."""
        return [a / n if n else 0.0 for a, n in zip(self.accepted, self.offered, strict=True)]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.decode_s if self.decode_s else 0.0


@dataclass(slots=True)
class RoundTrace:
    """One round's tree: parent -1 at the root, -2 at padding; score as in kdtree.tree.TokenTree.

    path: nodes walked; emitted: tokens kept of the round, one after each of them
    """

    token: list[int]
    parent: list[int]
    score: list[float]
    path: list[int]
    emitted: list[int]


@dataclass(slots=True)
class Chunk:
    """What one round added: text that is certain, tokens, and at the end the reason."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    acceptance: int


@dataclass(slots=True)
class Completion:
    """finish_reason: "stop" (a stop string, a stop token, the end of sequence), "length", or in the
    last chunk of a stream "error", before NumericsError is raised;
    stop_reason: the stop string or token, None for the model's own end of sequence
    logprobs: for each token, log-probabilities by token id: itself and the best ones"""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] | None = None
    metrics: Metrics = field(default_factory=Metrics)
    trace: list[RoundTrace] | None = None


@dataclass(slots=True)
class Result:
    """A prompt's completions; the attributes of the first can be asked of the result itself."""

    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.completions[0].stop_reason

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        return self.completions[0].logprobs

    @property
    def metrics(self) -> Metrics:
        return self.completions[0].metrics
