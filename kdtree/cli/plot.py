"""Draft trees as pictures, by matplotlib, which is asked for only when one is wanted."""

import warnings
from pathlib import Path

from kdtree.cli import draw
from kdtree.outputs import RoundTrace
from kdtree.text import Tokenizer

ACCEPTED, DRAFTED, OWN = "tab:green", "lightgrey", "tab:cyan"
COLUMN, ROW = 1.6, 0.45  # inches of a depth and of a leaf


def check(directory: Path | None) -> None:
    """Raises what `rounds` would, before the work whose rounds are to be drawn is done.

    ValueError without matplotlib, OSError where the directory cannot be made; None asks for nothing
    """
    if directory is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "--trace-png draws with matplotlib, which is not installed: pip install matplotlib"
        ) from None
    directory.mkdir(parents=True, exist_ok=True)


def rounds(
    traces: list[RoundTrace], tokenizer: Tokenizer | None, directory: Path, prefix: str = ""
) -> None:
    """A picture of every round: DIRECTORY/round-001.png and so on, the names after a prefix."""
    for number, trace in enumerate(traces, 1):
        tree(trace, tokenizer, directory / f"{prefix}round-{number:03}.png")


def tree(trace: RoundTrace, tokenizer: Tokenizer | None, path: Path) -> None:
    """One round's tree, from the root on the left: at each node the score of its path."""
    from matplotlib.figure import Figure

    nodes = draw.nodes(trace, tokenizer)
    places = _places([node.parent for node in nodes])
    across, down = (1 + max(place[i] for place in places) for i in (0, 1))
    figure = Figure(figsize=(COLUMN * (across + 0.5), ROW * (down + 1)), layout="constrained")
    axes = figure.add_subplot()
    axes.axis("off")
    axes.set_xlim(-0.5, across - 0.4)
    axes.set_ylim(down - 0.5, -0.5)
    for node, (x, y) in zip(nodes, places, strict=True):
        color = OWN if node.is_own else ACCEPTED if node.is_accepted else DRAFTED
        if node.parent >= 0:
            ends = zip(places[node.parent], (x, y), strict=True)
            width = 1 + 1.5 * (node.is_accepted or node.is_own)
            axes.plot(*ends, color=color, linewidth=width, zorder=1)
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": color}
        text = f"{node.token}  {node.note}".rstrip()
        how = {"ha": "center", "va": "center", "fontsize": 8, "bbox": box, "zorder": 2}
        axes.text(x, y, text, parse_math=False, **how)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font has not every script
        figure.savefig(path, dpi=120)


def _places(parents: list[int]) -> list[tuple[float, float]]:
    """Of each node its depth, and its place among the leaves or in the middle of its children."""
    depth, children = [], [[] for _ in parents]
    for node, parent in enumerate(parents):
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
        if parent >= 0:
            children[parent].append(node)
    down, leaves, order, stack = [0.0] * len(parents), 0, [], [0]
    while stack:
        order.append(stack.pop())
        stack += reversed(children[order[-1]])
    for node in order:
        if not children[node]:
            down[node], leaves = leaves, leaves + 1
    for node in reversed(order):
        if children[node]:
            down[node] = (down[children[node][0]] + down[children[node][-1]]) / 2
    return list(zip(depth, down, strict=True))
