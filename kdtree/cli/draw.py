"""What the commands show on a terminal: progress, tokens, draft trees."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from rich.tree import Tree

from kdtree.text import Tokenizer

ACCEPTED, DRAFTED = "bold green", "dim"

_SIGNS = {ord("\n"): "⏎", ord("\t"): "⇥", ord(" "): "·"}


class Bar:
    """The parts of a command's work, and how far the loading of weights has come."""

    def __init__(self, bar: Progress, total: int):
        self._bar = bar
        self._parts = bar.add_task("", total=total, completed=-1)
        self._weights, self._start = None, 0.0

    def begin(self, part: str) -> None:
        """A part of the work begins."""
        self._bar.update(self._parts, advance=1, description=part)

    def load(self, done: int, total: int) -> None:
        """Bytes loaded and in all; shown with GB/s and the time left once that takes a second."""
        if self._weights is None:
            self._start = time.perf_counter()
            self._weights = self._bar.add_task("weights", total=total, visible=False)
        seconds = time.perf_counter() - self._start
        if seconds < 1 and done < total:
            return
        rate = done / max(seconds, 1e-9)
        sizes = f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
        text = f"weights: {sizes}, {rate / 1e9:.2f} GB/s, {(total - done) / rate:.0f} s left"
        self._bar.update(self._weights, completed=done, description=text, visible=done < total)
        if done == total:
            self._weights = None


@contextmanager
def progress(total: int) -> Iterator[Bar]:
    """A bar on stderr, where that is a terminal. total: parts of the work"""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield Bar(bar, total)


def safe(text: str) -> str:
    """The text with control characters as signs, so that it cannot steer the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else _sign(c) for c in text)


def token(tokenizer: Tokenizer | None, id: int) -> str:
    """A token on one line, its blanks visible; its id where it has no text.

    Bytes of an incomplete character are in hexadecimal.
    """
    if tokenizer is None:
        return str(id)
    data = tokenizer.token_bytes(id, special=True)
    try:
        return safe(data.decode().translate(_SIGNS)) or f"<{id}>"
    except UnicodeDecodeError:
        return f"<{data.hex(' ')}>"


def tree(trace, tokenizer: Tokenizer | None) -> Tree:
    """The draft tree of a round: each node with the log-probability that the drafter gave its path.

    trace: RoundTrace; the accepted path is green and ticked, and at its end stands the token that
    the target added itself.
    """
    accepted = set(trace.path)
    branches: dict[int, Tree] = {}
    for n, parent in enumerate(trace.parent):
        if parent < 0 and n > 0:
            continue  # padding
        style = ACCEPTED if n in accepted else DRAFTED
        label = Text(f"{token(tokenizer, trace.token[n])} ", style)
        label.append("root" if n == 0 else f"{trace.score[n]:.2f}", "dim")
        if n in accepted and n > 0:
            label.append(" ✓", ACCEPTED)
        branches[n] = branches[parent].add(label) if n else Tree(label)
        branches[n].guide_style = style
    if len(trace.emitted) == len(trace.path):  # fewer where a stop cut the round
        added = Text(f"{token(tokenizer, trace.emitted[-1])} ", "bold cyan")
        branches[trace.path[-1]].add(added.append("the target's own", "dim cyan"))
    return branches[0]


def write(text: str) -> None:
    """Text on stdout as it is, at once; what the terminal cannot show becomes '?'."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _sign(character: str) -> str:
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else "�"
