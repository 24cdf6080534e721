"""Generations: a captured round again and again without the host, see csrc/generation.h.

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


def generation_launch(active: Tensor, generation: int) -> None:
    """Launches it on the current stream: one round in any case, then others while they are due."""
    ops.generation_launch.default(active, generation)


def generation_free(active: Tensor, generation: int) -> None:
    """Frees it. The device must be done with it."""
    ops.generation_free.default(active, generation)
