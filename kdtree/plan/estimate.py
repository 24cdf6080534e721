"""What a model takes on a number of GPUs, and the least time of its steps, before it is loaded."""

from collections.abc import Iterable
from dataclasses import dataclass

from kdtree.checks import shown
from kdtree.config import ModelConfig
from kdtree.errors import CapacityError
from kdtree.plan import formulas
from kdtree.plan.tensors import PARTS, ROUTED, Tensors


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs that share one model by tensor parallelism.

    memory, reserve: bytes of each GPU, and of these what weights and cache may not take
    bandwidth: bytes/s; peak: flop/s of bfloat16 products
    """

    gpus: int
    memory: float
    reserve: float
    bandwidth: float = formulas.BANDWIDTH
    peak: float = formulas.PEAK


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the model.

    stored_as, held_as: in the checkpoint and in the engine, formats of 1 % of it and more
    stored_bytes: of the whole; rank_bytes, rank_parameters: of the share that a rank holds
    """

    part: str
    parameters: int
    stored_as: str
    stored_bytes: int
    held_as: str
    rank_bytes: int
    rank_parameters: int


@dataclass(frozen=True, slots=True)
class Size:
    """A legal number of ranks, bytes of weights on each, and the longest context in tokens.

    context: at most the model's own; 0 where not even the weights fit
    """

    ranks: int
    rank_bytes: int
    context: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """What one step of so many nodes takes at the least, in ms by cause.

    experts: distinct ones a layer; weights: reading them, by part; context: reading the cached
    latents; all_reduce: an assumption, not a floor
    """

    nodes: int
    experts: float
    weights: dict[str, float]
    context: float
    all_reduce: float

    @property
    def routed(self) -> float:
        return self.weights.get(ROUTED, 0.0)

    @property
    def rest(self) -> float:
        """All weights but the routed experts'."""
        return sum(ms for part, ms in self.weights.items() if part != ROUTED)

    @property
    def read(self) -> float:
        """The floor proper, of memory and arithmetic."""
        return self.routed + self.rest + self.context

    @property
    def total(self) -> float:
        return self.read + self.all_reduce


@dataclass(frozen=True, slots=True)
class Plan:
    """A model on a machine.

    cache_bytes: of a token, on every rank; fp8: whether its latents are in FP8
    context: tokens before each of `steps`; longest: tokens that fit, at most the model's own;
    fitting: tokens that memory alone would allow
    sizes: up to the machine's; legal: all; illegal: up to the machine's, with the reasons
    """

    machine: Machine
    parts: tuple[Part, ...]
    cache_bytes: int
    fp8: bool
    context: int
    longest: int
    fitting: int
    steps: tuple[StepTime, ...]
    sizes: tuple[Size, ...]
    legal: tuple[int, ...]
    illegal: dict[int, tuple[str, ...]]

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def stored_bytes(self) -> int:
        return sum(part.stored_bytes for part in self.parts)

    @property
    def rank_bytes(self) -> int:
        return sum(part.rank_bytes for part in self.parts)


def make_plan(
    config: ModelConfig,
    tensors: Iterable[Tensors],
    machine: Machine,
    *,
    context: int,
    nodes: Iterable[int],
    int4: bool = False,
    fp8: bool = False,
) -> Plan:
    """Plans a model on a machine.

    tensors: of its checkpoint; those that are no part of the text model are left out
    context: tokens committed before a step; nodes: of the trees that floors are wanted for
    int4: routed experts become INT4 when they are loaded; fp8: latents are cached in FP8
    Raises ValueError where the model cannot be divided among the GPUs, CapacityError where it has
    not the context.
    """
    if context > config.max_positions:
        raise CapacityError(f"context is {shown(context)}, the model has {config.max_positions}")
    tensors = [each for each in tensors if each.part in PARTS]
    has_int4 = any("int4" == each.held_as(int4) for each in tensors)
    legal, illegal = _sizes(config, machine.gpus, has_int4)
    parts = _parts(tensors, machine.gpus, int4)
    fitting = _fitting(config, machine, sum(part.rank_bytes for part in parts), fp8)
    smaller = [ranks for ranks in legal if ranks <= machine.gpus]
    return Plan(
        machine=machine,
        parts=parts,
        cache_bytes=formulas.cache_bytes(config, fp8),
        fp8=fp8,
        context=context,
        longest=min(fitting, config.max_positions),
        fitting=fitting,
        steps=tuple(_step(config, parts, machine, context, n, fp8) for n in nodes),
        sizes=tuple(_size(config, tensors, machine, r, int4, fp8) for r in smaller),
        legal=legal,
        illegal=illegal,
    )


def _sizes(
    config: ModelConfig, gpus: int, int4: bool
) -> tuple[tuple[int, ...], dict[int, tuple[str, ...]]]:
    """All legal numbers of ranks, and why the others up to the GPUs' are none."""
    legal = tuple(formulas.legal_sizes(config, int4))
    if gpus not in legal:
        reasons = "; ".join(formulas.indivisible(config, gpus, int4))
        raise ValueError(f"gpus is {gpus}, but {reasons}; legal: {', '.join(map(str, legal))}")
    others = (ranks for ranks in range(1, gpus + 1) if ranks not in legal)
    return legal, {ranks: tuple(formulas.indivisible(config, ranks, int4)) for ranks in others}


def _parts(tensors: list[Tensors], ranks: int, int4: bool) -> tuple[Part, ...]:
    owned = {name: [each for each in tensors if each.part == name] for name in PARTS}
    return tuple(
        Part(
            part=name,
            parameters=sum(each.parameters for each in own),
            stored_as=_formats((each.stored_as, each.parameters) for each in own),
            stored_bytes=sum(each.bytes for each in own),
            held_as=_formats((each.held_as(int4), each.parameters) for each in own),
            rank_bytes=sum(each.held_bytes(int4) // each.share(ranks) for each in own),
            rank_parameters=sum(each.parameters // each.share(ranks) for each in own),
        )
        for name, own in owned.items()
        if own
    )


def _formats(found: Iterable[tuple[str, int]]) -> str:
    totals = {}
    for name, parameters in found:
        totals[name] = totals.get(name, 0) + parameters
    least = 0.01 * sum(totals.values())
    return ", ".join(sorted(name for name, parameters in totals.items() if parameters > least))


def _size(
    config: ModelConfig,
    tensors: list[Tensors],
    machine: Machine,
    ranks: int,
    int4: bool,
    fp8: bool,
) -> Size:
    held = sum(part.rank_bytes for part in _parts(tensors, ranks, int4))
    return Size(ranks, held, min(_fitting(config, machine, held, fp8), config.max_positions))


def _fitting(config: ModelConfig, machine: Machine, weights: int, fp8: bool) -> int:
    return formulas.longest_context(config, machine.memory - machine.reserve - weights, fp8)


def _step(
    config: ModelConfig,
    parts: tuple[Part, ...],
    machine: Machine,
    context: int,
    nodes: int,
    fp8: bool,
) -> StepTime:
    where, m = (machine.bandwidth, machine.peak), config.moe
    experts = formulas.distinct_experts(m.experts, m.experts_per_token, nodes) if m else 0.0
    weights = {}
    for part in parts:
        read, used = 1.0, 1.0  # the shares that memory delivers, and that each node multiplies with
        if part.part == ROUTED and m:  # headers may hold what the config knows nothing of
            read, used = experts / m.experts, m.experts_per_token / m.experts
        elif part.part == "embedding" and not config.tied:
            continue  # N rows of it
        flops = 2 * nodes * part.rank_parameters * used
        weights[part.part] = 1e3 * formulas.seconds(part.rank_bytes * read, flops, *where)
    attention = config.layers * formulas.seconds(
        formulas.attention_bytes(config, context, fp8),
        formulas.attention_flops(config, context, nodes, machine.gpus),
        *where,
    )
    reduces = formulas.all_reduces(config) if machine.gpus > 1 else 0
    return StepTime(
        nodes=nodes,
        experts=experts,
        weights=weights,
        context=1e3 * attention,
        all_reduce=1e3 * reduces * formulas.all_reduce_seconds(config, nodes),
    )
