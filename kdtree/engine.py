"""The engine: the round, who takes part in it, and when a sequence ends.

Autoregressive decoding is a draft tree with one node; a prompt is a chain whose tokens are known.
A round makes every decision on the device; the host reads one record of it.
"""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Lock

import torch

from kdtree import options
from kdtree.cache import KvCache
from kdtree.checks import flag
from kdtree.config import load as load_config
from kdtree.costs import Costs
from kdtree.drafters import Drafter, DrafterConfig, Setup
from kdtree.errors import NumericsError
from kdtree.graphs import Graphs
from kdtree.launches import Launches
from kdtree.measure import automatic
from kdtree.models import load_model
from kdtree.options import Prompt
from kdtree.outputs import Chunk, Result
from kdtree.phases import Phases
from kdtree.record import Asked, Round
from kdtree.request import Request
from kdtree.sampling import SamplingParams
from kdtree.state import State
from kdtree.text import Message, load_chat_template, load_tokenizer
from kdtree.tree import MAX_DEPTH, TokenTree
from kdtree.verify import verify
from kdtree.weights import Progress

# Rows of a prompt's chunk, by device; chunks end at multiples of it.
PREFILL = {"cpu": 256, "cuda": 2048}


class Engine:
    """A model, a drafter, and room for max_batch sequences of max_seq_len tokens.

    model: directory in Hugging Face layout; None for the small demo model that ships with this
    drafter: "none", "ngram", "dflash", or a drafter's config; budget: draft nodes a round, "auto"
        for as many as pay, or the Costs to choose by; tree: "best-first" or "chain";
        chain_seed: insert the best chain first; remeasure: for "auto", measure what rounds cost
        though it is known from an engine like this one
    device: "auto" (CUDA where there is one), or torch's name; dtype: "auto" (bfloat16 on CUDA,
        float32 on a CPU), "float32" or "bfloat16"
    kv_cache_dtype: "auto" (that of dtype), or "fp8" for latents in e4m3 with a scale each
    quantize: "int4" for routed experts that the checkpoint holds otherwise, None to keep them so
    max_seq_len: prompt and continuation together; None for the model's own length, 32768 at most
    cuda_graphs: on CUDA, replay rounds from graphs; the outputs are the same without
    progress: called with the bytes of weights loaded so far, and the bytes in all, as they grow
    One generation at a time: a second one while a stream is open raises ValueError.
    Raises ConfigError, CheckpointError, CapacityError, and ValueError on an option out of range.
    """

    @torch.inference_mode(False)  # so that what is made here can be written in any mode
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        drafter: str | DrafterConfig = "none",
        budget: int | str | Costs = "auto",
        tree: str = "best-first",
        chain_seed: bool = False,
        remeasure: bool = False,
        device: str = "auto",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        quantize: str | None = None,
        max_seq_len: int | None = None,
        max_batch: int = 1,
        cuda_graphs: bool = True,
        progress: Progress | None = None,
    ):
        directory = options.directory(model)
        self.device = options.device(device)
        self.dtype = options.dtype(dtype, self.device)
        self.max_batch = options.batch(max_batch)
        self.config = load_config(directory)
        self.max_seq_len = options.context(max_seq_len, self.config)
        fp8 = options.fp8_cache(kv_cache_dtype, self.config)
        where = {"device": self.device, "dtype": self.dtype}
        setup = Setup(
            budget=options.budget(budget),
            chain=options.is_chain(tree),
            chain_seed=flag("chain_seed", chain_seed),
            target=self.config,
            directory=directory,
            sequences=self.max_batch,
            max_seq_len=self.max_seq_len,
            **where,
        )
        self.drafter: Drafter = options.drafter(drafter).create(setup)
        self.tokenizer = load_tokenizer(directory)
        self.chat_template = load_chat_template(directory, self.tokenizer)
        self.model = load_model(
            directory,
            positions=self.max_seq_len + MAX_DEPTH + 1,
            quantize=options.quantize(quantize),
            progress=progress,
            **where,
        )
        self.drafter.bind(self.model)
        self.cache = KvCache.of(self.config, self.max_batch, self.max_seq_len, fp8=fp8, **where)
        self.state = State(self.max_batch, self.max_seq_len, self.device)
        graphs = Graphs(self.device, flag("cuda_graphs", cuda_graphs))
        anew = flag("remeasure", remeasure)
        self._launches = Launches(self.device, graphs)
        if setup.budget is None:
            own = self.model, self.cache, self.state, graphs.on
            self.drafter = automatic(self.drafter, budget, setup, anew, *own)
        self._free = Lock()  # held by the one generation at a time
        self._ended: torch.cuda.Event | None = None  # the last one's rounds

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        trace: bool = False,
    ) -> Result | list[Result]:
        """Continues one prompt or several; one in, one out, a list in, a list out, in order.

        prompts: text or token ids; params: for all, or one each; trace: keep every round's tree
        Raises CapacityError on a prompt that leaves no room, NumericsError on non-finite logits,
        ValueError and TypeError on prompts or params that make no sense.
        """
        prompts, params, single = options.prompts(prompts, params)
        results, requests = self._requests(prompts, params, trace)
        for _ in self._run(requests):
            pass
        return results[0] if single else results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Continues one prompt, a chunk a round. params.n must be 1. Raises as generate.

        On CUDA the device is up to 64 rounds ahead; other work on the same stream waits for them.
        """
        prompts, params, single = options.prompts(prompt, params)
        if not single or params[0].n != 1:
            raise ValueError("stream takes one prompt and gives one completion: n must be 1")
        _, requests = self._requests(prompts, params, trace=False)
        return self._chunks(requests)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        tools: list[dict] | None = None,
        chat_template_kwargs: dict | None = None,
        add_generation_prompt: bool = True,
        trace: bool = False,
    ) -> Result | list[Result]:
        """The next message of one conversation or several; a list in, a list out, in order.

        messages: {"role": ..., "content": ...} each, as the model's chat template wants them;
            what they spell is text, special tokens too
        tools: JSON schemas; chat_template_kwargs: other variables of the template's
        add_generation_prompt: begin the assistant's turn; params, trace: as generate
        A result's prompt is the text that the template made. It ends where the model ends its turn.
        Raises as generate, ValueError where the model has no chat template, and what
        ChatTemplate.encode raises.
        """
        conversations, single = options.conversations(messages)
        template = options.template(self.chat_template)
        asked = (tools, chat_template_kwargs, add_generation_prompt)
        prompts = [template.encode(each, *asked) for each in conversations]
        results = self.generate([ids for _, ids in prompts], params, trace=trace)
        for result, (text, _) in zip(results, prompts, strict=True):
            result.prompt = text
        return results[0] if single else results

    def stream_chat(
        self,
        messages: list[Message],
        params: SamplingParams | None = None,
        *,
        tools: list[dict] | None = None,
        chat_template_kwargs: dict | None = None,
        add_generation_prompt: bool = True,
    ) -> Iterator[Chunk]:
        """The next message of one conversation, a chunk a round; arguments and errors as chat."""
        conversations, single = options.conversations(messages)
        if not single:
            raise ValueError(
                f"stream_chat takes one conversation, not a list of {len(conversations)}"
            )
        asked = (tools, chat_template_kwargs, add_generation_prompt)
        _, ids = options.template(self.chat_template).encode(messages, *asked)
        return self.stream(ids, params)

    def _chunks(self, requests: list[Request]) -> Iterator[Chunk]:
        # A stream that is closed frees the engine at once, whoever still holds on to it.
        with closing(self._run(requests)) as run:
            for _, chunk in run:
                yield chunk

    def _round(self, asked: Asked, phases: Phases | None) -> Round:
        """Commits at least one token per active sequence. phases: where the round began already"""
        phases = phases or Phases(self.device).begin()
        with phases.phase("draft"):
            tree = self.drafter.propose(self.state)
        with phases.phase("forward"):
            step = self.cache.place(tree)
            hidden, taps = self.model(step, self.cache, self.drafter.taps)
            logits = self.model.logits(hidden)
        with phases.phase("verify"):
            path = verify(tree, step, logits, self.state.sampling, asked.masking)
        with phases.phase("commit"):
            self.cache.commit(path)
            told = self.drafter.commit(path, taps)
            record = self.state.commit(path, tree.depth)
        best = path.best(logits, asked.best) if asked.best else None
        return Round.of(tree, path, record, best, asked.traced, phases.times, told)

    @torch.inference_mode(False)  # as above: some of what rounds leave is written in later calls
    @torch.no_grad()
    def _run(self, requests: list[Request]) -> Iterator[tuple[Request, Chunk]]:
        """Runs requests to their ends, max_batch at a time; each that ends makes room for one."""
        waiting, running = deque(requests), [None] * self.max_batch
        asked, spent = Asked.by(requests), Counter()
        if not self._free.acquire(blocking=False):
            raise ValueError("the engine is generating: exhaust or close its stream first")
        try:
            if self._ended:  # a last round may be on its way, on another stream
                torch.cuda.current_stream(self.device).wait_event(self._ended)
            while waiting or any(running):
                self._admit(waiting, running)
                own = self.drafter, self.state, asked, self._round
                with closing(self._launches.rounds(*own, running, waiting, spent)) as rounds:
                    for emitted in rounds:
                        for b, request in enumerate(running):
                            if request is None:
                                continue
                            chunk = request.accept(emitted[b])
                            if request.finished:
                                self._halt(b)
                                request.completion.metrics.phases = dict(spent)
                                running[b] = None
                            yield request, chunk
                            if request.completion.finish_reason == "error":
                                raise NumericsError(*request.failure())
        finally:
            try:
                self.state.active.fill_(False)
                if self.device.type == "cuda":
                    self._ended = torch.cuda.current_stream(self.device).record_event()
            finally:
                self._free.release()

    def _halt(self, b: int) -> None:
        """Sequence b takes part in no later round, wherever rounds are launched from."""
        self.state.halt(b)
        self._launches.end(b)

    def _admit(self, waiting: deque[Request], running: list[Request | None]) -> None:
        """Starts those who wait in the sequences that are free."""
        for b, request in enumerate(running):
            if request is None and waiting:
                started = self._start(b, waiting.popleft())
                for other in filter(None, running):
                    other.waited(started)
                running[b] = started

    def _start(self, b: int, request: Request) -> Request:
        """Puts a request in sequence b: all of its prompt but the last token goes to the cache."""
        request.begin()
        self.state.start(b, request.prompt, request.params, request.stop)
        self.drafter.start(b, request.number, request.prompt)
        cache = self.cache.sequence(b)
        cache.context.zero_()
        known = self.state.token[b : b + 1, : len(request.prompt) - 1]
        rows = PREFILL[self.device.type]
        for start in range(0, known.shape[1], rows):
            chunk = known[:, start : start + rows]
            step = cache.place(TokenTree.chain(chunk), start)
            _, taps = self.model(step, cache, self.drafter.taps)
            cache.extend(chunk.shape[1])
            self.drafter.prefill(b, taps)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that prefill and decode are timed apart
        request.prefilled()
        return request

    def _requests(
        self, prompts: list[Prompt], params: list[SamplingParams], trace: bool
    ) -> tuple[list[Result], list[Request]]:
        own = self.config, self.tokenizer, self.state
        return options.requests(prompts, params, trace, *own)
