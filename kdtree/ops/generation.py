"""Graphs made of captured rounds: one again and again without the host, or one that the device
chooses, see csrc/generation.h.

They are made of CUDA graphs, so there are none on a CPU, and nothing of them for torch.compile.
"""

from torch import Tensor

from kdtree.ops._library import ops


def generation_build(
    graph: int, packed: Tensor, active: Tensor, ring: Tensor, control: Tensor
) -> int:
    """Makes a generation of a round's graph, which it copies.

    graph: a cudaGraph_t, captured, whose nodes a conditional body may hold (no events)
    packed: [B, width] int64, what each round leaves for the host; active: [B] bool, who runs
    ring: [slots, B * width] int64, and control: [3 + B] int64, both pinned: rounds done; rounds
    read; sequences that must run for another round; and by sequence, not 0 to end it
    returns what the other two take; the tensors must live as long
    """
    return ops.generation_build.default(graph, packed, active, ring, control)


def choice_build(graph: int, choice: Tensor, record: Tensor, count: int) -> int:
    """Begins a graph that runs another, then one of `count` rounds, by what that leaves.

    graph: a cudaGraph_t, captured; choice: [1] int32, which it writes, below count
    record: [1 + most words of a round] int64: the choice, then what the chosen round leaves
    returns what the others take; to be completed by `choice_add`, `count` times, and `choice_end`
    """
    return ops.choice_build.default(graph, choice, record, count)


def choice_add(made: int, number: int, graph: int, packed: Tensor, record: Tensor) -> None:
    """Its round `number`. graph: as for a generation; packed: [B, width] int64, what it leaves"""
    ops.choice_add.default(made, number, graph, packed, record)


def choice_end(record: Tensor, made: int) -> None:
    """All of its rounds are added. The tensors must live as long as it."""
    ops.choice_end.default(record, made)


def graph_launch(on: Tensor, made: int) -> None:
    """Launches a choice, or a generation: one round in any case, then others while they are due.

    on: any tensor of its device, whose current stream it is launched on
    """
    ops.graph_launch.default(on, made)


def graph_free(on: Tensor, made: int) -> None:
    """Frees it. The device must be done with it."""
    ops.graph_free.default(on, made)
