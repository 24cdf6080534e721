"""One completion as the host follows it: its text, its stop strings, its results."""

import time
from dataclasses import dataclass

from kdtree.outputs import Chunk, Completion, RoundTrace
from kdtree.sampling import SamplingParams
from kdtree.state import FAILED, LENGTH, RUNNING, STOP
from kdtree.text import Detokenizer, StopStrings, Tokenizer

REASONS = {RUNNING: None, STOP: "stop", LENGTH: "length", FAILED: "error"}


@dataclass(slots=True)
class Emitted:
    """What a round's record says of one sequence.

    reason: of kdtree.state; offered, accepted: depth of the tree, and of its accepted path, -1
    where the sequence took no part
    best: for each token ids and log-probabilities, best first, or None; trace: the tree, or None
    """

    token_ids: list[int]
    logprobs: list[float]
    reason: int
    offered: int
    accepted: int
    best: list[list[tuple[int, float]]] | None = None
    trace: RoundTrace | None = None


class Request:
    """number: of the completion in the call; prompt: its tokens; stop: the tokens that end it."""

    def __init__(
        self,
        number: int,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        stop: list[int],
        tokenizer: Tokenizer | None,
        trace: bool,
    ):
        self.number, self.prompt, self.params, self.stop = number, prompt, params, stop
        self.completion = Completion(index, trace=[] if trace else None)
        self.completion.metrics.prompt_tokens = len(prompt)
        if params.logprobs is not None:
            self.completion.logprobs = []
        self._began = self._prefilled = 0.0
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._stops = StopStrings(params.stop)

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None

    def begin(self) -> None:
        """The clock starts: the prompt goes to the model."""
        self._began = time.perf_counter()

    def prefilled(self) -> None:
        """The prompt is in the cache; the first round follows."""
        self._prefilled = time.perf_counter()
        self.completion.metrics.prefill_s = self._prefilled - self._began

    def waited(self, other: "Request") -> None:
        """Another's prompt went to the model meanwhile: no part of this one's decoding."""
        self._prefilled += other.completion.metrics.prefill_s

    def failure(self) -> tuple[int, int]:
        """Round and position of the token that could not be drawn."""
        done = self.completion
        return done.metrics.rounds - 1, len(self.prompt) + len(done.token_ids)

    def accept(self, emitted: Emitted) -> Chunk:
        """Takes a round's tokens one by one; a stop string ends the text where it is complete."""
        done, text, taken = self.completion, "", 0
        last = len(emitted.token_ids) - 1
        for i, token in enumerate(emitted.token_ids):
            taken += 1
            done.token_ids.append(token)
            if done.logprobs is not None:
                done.logprobs.append(self._logprobs(emitted, i))
            if i == last and emitted.reason == STOP:
                break  # a stop token is no part of the text
            text += self._stops.feed(self._detokenizer.feed(token) if self._detokenizer else "")
            if self._stops.stop is not None:
                break
        if emitted.reason != RUNNING and self._stops.stop is None:
            rest = self._detokenizer.flush() if self._detokenizer else ""
            text += self._stops.feed(rest) + self._stops.flush()
        self._finish(emitted)
        done.text += text
        self._count(taken, emitted)
        return Chunk(text, done.token_ids[len(done.token_ids) - taken :], done.finish_reason, taken)

    def _finish(self, emitted: Emitted) -> None:
        done = self.completion
        if self._stops.stop is not None:
            done.finish_reason, done.stop_reason = "stop", self._stops.stop
        else:
            done.finish_reason = REASONS[emitted.reason]
            if emitted.reason == STOP and done.token_ids[-1] in self.params.stop_token_ids:
                done.stop_reason = done.token_ids[-1]

    def _logprobs(self, emitted: Emitted, i: int) -> dict[int, float]:
        best = dict(emitted.best[i][: self.params.logprobs]) if emitted.best else {}
        return best | {emitted.token_ids[i]: emitted.logprobs[i]}

    def _count(self, taken: int, emitted: Emitted) -> None:
        metrics, now = self.completion.metrics, time.perf_counter()
        if not metrics.rounds:
            metrics.ttft_s = now - self._began
        metrics.decode_s = now - self._prefilled
        metrics.tokens += taken
        metrics.rounds += 1
        metrics.histogram += [0] * (taken + 1 - len(metrics.histogram))
        metrics.histogram[taken] += 1
        deeper = [0] * (emitted.offered - len(metrics.offered))
        metrics.offered += deeper
        metrics.accepted += deeper
        for depth in range(emitted.offered):
            metrics.offered[depth] += 1
            metrics.accepted[depth] += depth < emitted.accepted
        if emitted.trace is not None:
            emitted.trace.emitted = emitted.trace.emitted[:taken]  # a stop string may end it early
            self.completion.trace.append(emitted.trace)
