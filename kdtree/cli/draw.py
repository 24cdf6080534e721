"""What the commands show on a terminal: progress, tokens, draft trees."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from rich.tree import Tree

from kdtree.outputs import RoundTrace
from kdtree.text import Tokenizer

ACCEPTED, DRAFTED, OWN = "bold green", "dim", "bold cyan"

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


class Node(NamedTuple):
    """A node of a round's tree as it is shown. parent: its place in the list, -1 of the root

    note: "root", the score that the drafter gave its path, or whose token it is
    is_own: it is the target's own token at the end of the accepted path, no draft
    """

    token: str
    parent: int
    note: str
    is_accepted: bool
    is_own: bool = False


def nodes(trace: RoundTrace, tokenizer: Tokenizer | None) -> list[Node]:
    """The nodes of a round's tree, parents before children, padding left out.

    The last is the token that the target added itself, but where a stop or a limit cut the round
    before it: then its last token is a draft like those before.
    """
    place, found, walked = {-1: -1}, [], set(trace.path)
    last = trace.path[-1]
    drafted = [
        n for n, p in enumerate(trace.parent) if p == last and trace.token[n] == trace.emitted[-1]
    ]
    walked |= set(drafted if len(trace.emitted) == len(trace.path) else ())
    for n, parent in enumerate(trace.parent):
        if n and parent < 0:
            continue  # padding
        place[n] = len(found)
        note = f"{trace.score[n]:.2f}" if n else "root"
        found.append(Node(token(tokenizer, trace.token[n]), place[parent], note, n in walked))
    if len(trace.emitted) == len(trace.path) and not drafted:
        added = token(tokenizer, trace.emitted[-1])
        found.append(Node(added, place[last], "the target's own", False, is_own=True))
    return found


def tree(trace: RoundTrace, tokenizer: Tokenizer | None) -> Tree:
    """The draft tree of a round; its accepted path is green and ticked."""
    branches: list[Tree] = []
    for node in nodes(trace, tokenizer):
        style = OWN if node.is_own else ACCEPTED if node.is_accepted else DRAFTED
        label = Text(f"{node.token} ", style).append(node.note, "dim")
        if node.is_accepted and node.parent >= 0:
            label.append(" ✓", ACCEPTED)
        branch = branches[node.parent].add(label) if branches else Tree(label)
        branch.guide_style = style
        branches.append(branch)
    return branches[0]


def rounds(traces: list[RoundTrace], tokenizer: Tokenizer | None) -> Iterator[Group]:
    """Each round's number, the tokens that it emitted, and its tree."""
    for number, trace in enumerate(traces, 1):
        yield Group(f"round {number}, tokens: {len(trace.emitted)}", tree(trace, tokenizer))


def by_depth(shares: list[float]) -> str:
    """Metrics.acceptance_by_depth in a line."""
    rates = ", ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(shares, 1))
    return f"accepted by depth, where the tree was so deep: {rates}"


def write(text: str) -> None:
    """Text on stdout as it is, at once; what the terminal cannot show becomes '?'."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _sign(character: str) -> str:
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else "�"
