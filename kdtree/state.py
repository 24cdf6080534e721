"""What a round carries from one to the next, for B sequences, all of it on the device."""

import torch
from torch import Tensor

from kdtree import ops
from kdtree.errors import CapacityError
from kdtree.sampling import SamplingParams
from kdtree.tree import MAX_DEPTH, Path
from kdtree.verify import Sampling

RUNNING, STOP, LENGTH, FAILED = range(4)  # why a sequence goes on or ends
MAX_STOPS = 64  # stop tokens a sequence
COLDEST = 1e-30  # a lower temperature is argmax: logits over it would leave float32


class State:
    """Tokens, lengths, limits and sampling of B sequences.

    token: [B, max_seq_len + 16] int64, the prompt and what was emitted
    length: [B] int32, how many of those are known; the last is the root of the next tree
    active: [B] bool; limit: [B] int32, the length at which a sequence ends
    stop: [B, 64] int64, tokens that end it, -1 for none
    sampling: per sequence, as ops.sample takes it
    """

    def __init__(self, sequences: int, max_seq_len: int, device: torch.device):
        def full(value, dtype, *shape):
            return torch.full((sequences, *shape), value, dtype=dtype, device=device)

        self.max_seq_len = max_seq_len
        self.token = full(0, torch.int64, max_seq_len + MAX_DEPTH + 1)
        self.length = full(1, torch.int32)
        self.limit = full(1, torch.int32)
        self.active = full(False, torch.bool)
        self.stop = full(-1, torch.int64, MAX_STOPS)
        self.sampling = Sampling(
            seed=full(0, torch.int64),
            temperature=full(0, torch.float32),
            top_k=full(0, torch.int32),
            top_p=full(1, torch.float32),
            min_p=full(0, torch.float32),
            masked=full(0, torch.int64, MAX_STOPS),
            masked_until=full(0, torch.int32),
        )

    def root(self) -> Tensor:
        """[B] int64, the last known token of each sequence."""
        return self.token.gather(1, (self.length - 1)[:, None].long())[:, 0]

    def start(self, b: int, prompt: list[int], params: SamplingParams, stop: list[int]) -> None:
        """Puts a prompt in sequence b. stop: the tokens that end it, the model's own included."""
        end = self.max_seq_len
        if params.max_tokens is not None:
            end = min(end, len(prompt) + params.max_tokens)
        s, masked = self.sampling, bool(stop and params.min_tokens)
        self.token[b, : len(prompt)] = torch.tensor(prompt)
        self.stop[b] = torch.tensor(stop + [-1] * (MAX_STOPS - len(stop)))
        s.masked[b] = torch.tensor((stop + stop[:1] * MAX_STOPS)[:MAX_STOPS] if masked else 0)
        s.masked_until[b] = min(len(prompt) + params.min_tokens, end) if masked else 0
        temperature = params.temperature if params.temperature > COLDEST else 0.0
        s.seed[b], s.temperature[b], s.top_k[b] = params.seed, temperature, params.top_k
        s.top_p[b], s.min_p[b] = params.top_p, params.min_p
        self.length[b], self.limit[b], self.active[b] = len(prompt), end, True

    def check(self, prompt: list[int], stop: list[int]) -> None:
        """Raises CapacityError where a prompt leaves no room, or the stop tokens are too many."""
        if len(prompt) >= self.max_seq_len:
            raise CapacityError(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of"
                f" {self.max_seq_len}"
            )
        if len(stop) > MAX_STOPS:
            raise CapacityError(f"{len(stop)} stop tokens asked, {MAX_STOPS} available")

    def halt(self, b: int) -> None:
        """Ends sequence b, whatever it was doing."""
        self.active[b] = False

    def commit(self, path: Path, depth: Tensor | None = None) -> Tensor:
        """Appends what the round emitted, up to the first stop token, then up to the limit.

        returns the round's record, [B, 2 + 2 J] int64: tokens kept; RUNNING, STOP, LENGTH or
        FAILED; the tokens; their log-probabilities' bits. The first `kept` of each are meant. With
        the depth: [B, N] int32 of the tree's nodes two columns more, first: the depth that the tree
        offered and the path accepted.
        """
        outcome = path.token, path.length, path.logprob, path.failed
        mine = self.token, self.length, self.active, self.limit, self.stop
        return ops.state_commit(*mine, *outcome, depth)
