"""An engine that writes a fixed text, so that what is shown of it is known."""

import torch

from kdtree import Chunk, Completion, Metrics, Result, RoundTrace

TEXT = "import os\n\n[os] = \x1b[1m🙂"


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, id, special=False):
        return bytes([id])


class FakeEngine:
    """Continues every prompt with TEXT, `width` tokens a round, each round taking a second."""

    made = []
    text = TEXT
    error = None

    def __init__(
        self,
        model=None,
        *,
        drafter="none",
        budget="auto",
        tree="best-first",
        chain_seed=False,
        remeasure=False,
        device="auto",
        dtype="auto",
        kv_cache_dtype="auto",
        quantize=None,
        max_seq_len=None,
        max_batch=1,
        cuda_graphs=True,
        progress=None,
    ):
        self.made.append(self)
        self.drafter, self.calls, self.messages = drafter, [], None
        self.tokenizer, self.device, self.dtype = Bytes(), torch.device("cpu"), torch.float32
        self.options = {"model": model, "budget": budget, "tree": tree, "device": device}
        self.options["remeasure"] = remeasure
        self.width = 1 if drafter == "none" else 4

    def rounds(self, params):
        if self.error:
            raise self.error
        ids = self.tokenizer.encode(self.text)[: params.max_tokens]
        return [ids[i : i + self.width] for i in range(0, len(ids), self.width)]

    def generate(self, prompts, params, *, trace=False):
        self.calls.append((prompts, params))
        if isinstance(prompts, list):
            results = [self.generate(prompt, params) for prompt in prompts]
            for i, result in enumerate(results):  # the phases run on through a call
                seconds = result.metrics.phases
                result.metrics.phases = {name: s * (i + 1) for name, s in seconds.items()}
            return results
        rounds = self.rounds(params)
        ids = [id for ids in rounds for id in ids]
        sizes = [sum(len(r) == n for r in rounds) for n in range(self.width + 1)]
        metrics = Metrics(len(prompts), len(ids), len(rounds), 0.5, 0.25, len(rounds), sizes)
        metrics.phases = {"draft": 0.5, "forward": 2.0, "verify": 0.25, "commit": 0.25}
        if self.width > 1:  # the depths of `chain`'s trees, and of their accepted paths
            metrics.offered = [sum(max(len(r) - 1, 1) > d for r in rounds) for d in range(3)]
            metrics.accepted = [sum(len(r) - 1 > d for r in rounds) for d in range(3)]
        best = None if params.logprobs is None else [{id: -0.5, 65: -2.0} for id in ids]
        completions = [
            Completion(
                index=i,
                text=self.tokenizer.decode(ids),
                token_ids=ids,
                finish_reason="length",
                logprobs=best,
                metrics=metrics,
                trace=[chain(r) for r in rounds] if trace else None,
            )
            for i in range(params.n)
        ]
        return Result(prompts, self.tokenizer.encode(prompts), completions)

    def chat(self, messages, params, *, trace=False):
        self.messages = messages
        return self.generate(messages[-1]["content"], params, trace=trace)

    def stream_chat(self, messages, params):
        self.messages = messages
        return self.stream(messages[-1]["content"], params)

    def stream(self, prompt, params):
        self.calls.append((prompt, params))
        for ids in self.rounds(params):
            yield Chunk(self.tokenizer.decode(ids), ids, None, len(ids))


def chain(emitted):
    """The trace of a round whose drafts, but for a padded node and a wrong one, were right."""
    drafts = emitted[:-1]
    n = len(drafts)
    return RoundTrace(
        token=[42, *drafts, 88, 0],
        parent=[-1, *range(n), 0, -2],
        score=[0.0, *(-0.25 * (i + 1) for i in range(n)), -3.5, -torch.inf],
        path=list(range(n + 1)),
        emitted=emitted,
    )
