"""hvdtrain bench: measures the parts of a job on this machine. Trained weights are discarded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from hvdtrain.cli.output import with_json_value
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
hvdtrain bench scaling [--config FILE] [key=value ...] real jobs on 1, 2, 4 ranks, and a prediction for many ranks
    --ranks 1,2,4             numbers of ranks
    --weak, --strong          keep batch.per_rank, or keep batch.size; default: both
    --steps 60                steps of each job; the first sixth is warm-up
    --repeat 1                runs of each job; all jobs run in turn
    --links nvlink:5us:300GB/s,ib:2us:25GB/s   links inside a node and between nodes to predict for; default: the link measured here
    --per-node 8              ranks on a node, for the prediction
    --limit 300               seconds that one job may take
    --png FILE                a picture of efficiency and prediction
each of them: --json FILE writes the result as JSON; --json or --json - prints it instead of the text"""  # noqa: E501
MODULES = {"step": "step", "allreduce": "allreduce", "data": "data", "scaling": "scaling.command"}


def bench(arguments: Sequence[str]) -> int:
    """Runs `bench`; returns the exit code. Raises UserError for an unknown bench or option."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    name, *rest = arguments
    if name not in MODULES:
        raise UserError(
            f"there is no bench {short(name)}",
            "command line of bench",
            nearest(name, list(MODULES)),
        )
    command: Callable[[list[str]], int] = getattr(
        importlib.import_module(f"hvdtrain.extras.bench.{MODULES[name]}"), f"bench_{name}"
    )
    return command(with_json_value(rest))


if __name__ == "__main__":
    sys.exit(bench(sys.argv[1:]))
