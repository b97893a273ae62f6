"""python -m hvdtrain bench: how fast this machine does what a job consists of; nothing is kept."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence

from hvdtrain.config.read import nearest
from hvdtrain.config.yaml_reader import short
from hvdtrain.errors import DONE, UserError

USAGE = """\
python -m hvdtrain bench step       [--config FILE] [key=value ...]   images/s, and where the time of a step goes; under mpirun too
    --rounds 7 --steps 20     rounds of so many steps
mpirun -np 2 python -m hvdtrain bench allreduce [key=value ...]       how fast the ranks add up, against plain MPI and a copy of memory
    --sizes 1KiB,4MiB,100MB   bytes of a vector; where left out, ten sizes from 1 B to 100 MB
    --budget 40               seconds in all; at least 5 rounds of each size all the same
python -m hvdtrain bench data       [--config FILE] [key=value ...]   how fast samples are read
python -m hvdtrain bench scaling    [--config FILE] [key=value ...]   real jobs on more and more ranks, and a prediction for many
    --ranks 1,2,4             how many
    --weak, --strong          batch.per_rank stays, or batch.size does; where left out, both
    --steps 60                of each job; the first sixth is warm-up
    --repeat 1                times that all of them are done, in turn
    --links nvlink:5us:300GB/s,ib:2us:25GB/s --per-node 8   what to predict for; where left out, the link that was measured here
    --limit 300               seconds that one job may take
    --png FILE                efficiency and prediction as a picture
with all of them: --json FILE, or - for the standard output, instead of the text"""
NAMES = ("step", "allreduce", "data", "scaling")


def bench(words: Sequence[str]) -> int:
    """The command behind `bench`; returns the exit code."""
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return DONE
    name, *rest = words
    if name not in NAMES:
        raise UserError(f"there is no bench {short(name)}", "command line of bench", nearest(name, NAMES))
    module = f"hvdtrain.cli.bench.{name}"
    if importlib.util.find_spec(module) is None:
        there = [other for other in NAMES if importlib.util.find_spec(f"hvdtrain.cli.bench.{other}")]
        raise UserError(f"this hvdtrain comes without bench {name}", "command line of bench", f"there are: {', '.join(there)}")
    command: Callable[[list[str]], int] = getattr(importlib.import_module(module), f"bench_{name}")
    return command(rest)


if __name__ == "__main__":
    sys.exit(bench(sys.argv[1:]))
