"""The command `kdtree`: demo, generate, bench, plan, inspect.

Results go to stdout, everything else to stderr.

A caller's mistake is one line on stderr and exit code 2; an interruption exits with 130.
"""

import argparse
import os
import sys

from kdtree.cli import bench, demo, generate, inspect, plan
from kdtree.errors import CapacityError, CheckpointError, ConfigError, NumericsError

MISTAKES = (
    CapacityError,
    CheckpointError,
    ConfigError,
    NumericsError,
    OSError,
    TypeError,
    ValueError,
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone. What Python still holds for it would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MISTAKES as error:
        print("kdtree:", " ".join(str(error).split()), file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kdtree", description="Lossless speculative decoding with draft trees."
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in (demo, generate, bench, plan, inspect):
        name = command.__name__.rpartition(".")[2]
        summary = command.__doc__.partition("\n")[0]
        command.add_arguments(commands.add_parser(name, help=summary, description=command.__doc__))
    return parser
