"""Work beside other work, where a CUDA graph is captured: two branches of it."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

A, B = TypeVar("A"), TypeVar("B")


def beside(aside: Callable[[], A], work: Callable[[], B], device: torch.device) -> tuple[A, B]:
    """What aside() and work() return, neither of which needs the other.

    What comes after waits for both; what aside() made is used again aside alone, which waits for
    what came before. Outside of a capture they run one after the other: there it is the host's
    launches that take time.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return aside(), work()
    main, other = torch.cuda.current_stream(device), _stream(device)
    other.wait_stream(main)
    try:
        with torch.cuda.stream(other):
            done = aside()
        return done, work()
    finally:  # a capture with an open branch cannot end, not even where it failed
        main.wait_stream(other)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Of a higher priority than a capture's own stream, so never the same."""
    return torch.cuda.Stream(device, priority=-1)
