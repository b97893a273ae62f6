"""hvdtrain bench: how fast this machine does what a job consists of. Nothing that a bench trains is
kept."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from hvdtrain.cli.output import with_json_value
from hvdtrain.config import extras
from hvdtrain.errors import DONE, UserError, nearest, short

USAGE = """\
hvdtrain bench step [--config FILE] [key=value ...]    images/s, and where the time of a step goes; under mpirun too
    --rounds 7                timed rounds
    --steps 20                steps of a round
mpirun -np 2 hvdtrain bench allreduce [key=value ...]  how fast the ranks sum, against plain MPI and a copy of memory
    --sizes 1KiB,4MiB,100MB   bytes of a vector; default: ten sizes from 1 B to 100 MB
    --budget 40               seconds in all; at least 5 rounds of each size in any case
hvdtrain bench data [--config FILE] [key=value ...]    how fast samples are read, against how fast a step uses them
    --rounds 5                timed rounds
{extras}\
each of them: --json FILE writes the result as JSON; --json or --json - prints it instead of the text"""  # noqa: E501
NAMES = ("step", "allreduce", "data")


def bench(arguments: Sequence[str]) -> int:
    """The command behind `bench`; returns the exit code. Raises UserError for an unknown bench or
    option."""
    if not arguments or {"-h", "--help"} & set(arguments):
        of_extras = "".join(f"{each.usage}\n" for each in extras.benches().values())
        print(USAGE.replace("{extras}", of_extras))
        return DONE
    name, *rest = arguments
    modules = {name: f"hvdtrain.cli.bench.{name}" for name in NAMES}
    modules |= {name: each.module for name, each in extras.benches().items()}
    if name not in modules:
        raise UserError(
            f"there is no bench {short(name)}",
            "command line of bench",
            nearest(name, list(modules)),
        )
    command: Callable[[list[str]], int] = getattr(
        importlib.import_module(modules[name]), f"bench_{name}"
    )
    return command(with_json_value(rest))


if __name__ == "__main__":
    sys.exit(bench(sys.argv[1:]))
