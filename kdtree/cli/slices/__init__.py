"""`kdtree bench --shape`: a model's layers at full size on this machine, without its checkpoint."""

import argparse
import time

import torch

from kdtree import options as limits
from kdtree.cli import machine, options
from kdtree.cli.slices.model import WEIGHTS, build, cut
from kdtree.cli.slices.parts import row
from kdtree.cli.slices.report import show
from kdtree.config.shapes import SHAPES, shape
from kdtree.plan.slice import identity

LAYERS, CONTEXT, NODES = 5, 4096, "1,4,8,16,32,64"
# Options that say how a whole model decodes, or which one.
OTHERS = "model drafter drafter_model quantize prompt max_seq_len".split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a slice of a large model, with random weights")
    known = ", ".join(SHAPES)
    group.add_argument("--shape", metavar="NAME|DIR|config.json", help=f"known: {known}")
    group.add_argument(
        "--layers", type=options.whole, metavar="N", help=f"1 dense of them; {LAYERS}"
    )
    group.add_argument("--weights", choices=WEIGHTS, help="of routed experts; random-int4")
    group.add_argument("--context", type=options.whole, metavar="N", help=f"tokens; {CONTEXT}")
    group.add_argument("--nodes", metavar="N,N", help=f"of the trees; {NODES}")


def run(arguments: argparse.Namespace) -> int:
    """Measures the slice that the arguments name, if they name a shape."""
    for name in OTHERS:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is no option of a slice (--shape)")
    if arguments.kv_cache_dtype != "auto":
        raise ValueError("--kv-cache-dtype is no option of a slice (--shape)")
    nodes = options.nodes(arguments.nodes or NODES)
    device = limits.device(arguments.device)
    dtype = limits.dtype(arguments.dtype, device)
    layers = LAYERS if arguments.layers is None else arguments.layers
    context = CONTEXT if arguments.context is None else arguments.context
    weights = arguments.weights or "random-int4"
    config = cut(shape(arguments.shape), layers)
    if arguments.json is not None:
        arguments.json.touch()  # so that a file that cannot be written fails now, not at the end
    began = time.perf_counter()
    with torch.no_grad():
        made = build(config, weights, context, device, dtype)
        peaks = machine.peaks(device)
        rows = [row(made, each, peaks) for each in nodes]
    facts = machine.header(device, peaks) | {
        "shape": arguments.shape,
        "identity": identity(config),
        "layers": layers,
        "dense_layers": config.moe.first_layer if config.moe else layers,
        "weights": weights,
        "weight_bytes": sum(p.nbytes for p in made.model.parameters()),
        "context": context,
        "dtype": str(dtype).removeprefix("torch."),
        "seconds": time.perf_counter() - began,
    }
    if arguments.json is not None:
        machine.write_results(arguments.json, rows, facts)
    show(rows, facts)
    return 0


def unasked(arguments: argparse.Namespace) -> None:
    """Raises ValueError on options of a slice where no shape is named."""
    for name in ("layers", "weights", "context", "nodes"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} is an option of a slice: it wants --shape")
