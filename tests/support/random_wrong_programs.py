"""Random programs of hvdtrain.horovod with one fault on one rank, many in one start; checks how
each ends on every rank.

python tests/support/random_wrong_programs.py FIRST_SEED PROGRAMS OUT.json

OUT: {"wrong": {program: what is wrong with its end}, "slowest_s": largest number of seconds until a
rank was told}
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from random_programs import Step, begin, steps_of

import hvdtrain.horovod as hvd

FAULTS = ("a missing call", "another shape", "another name", "another order")


class End(NamedTuple):
    """The end of a program on one rank."""

    message: str
    seconds: float


def with_fault(steps: list[Step], place: int, fault: str) -> list[Step]:
    step = steps[place]
    before = steps[:place]
    after = steps[place + 1 :]
    match fault:
        case "a missing call":
            return [*before, *after]
        case "another shape":
            return [*before, step._replace(shape=(*step.shape, 2)), *after]
        case "another name":
            return [*before, step._replace(name=f"not {step.name}"), *after]
    return [*before, after[0], step, *after[1:]]


def end_of(steps: list[Step]) -> End:
    start = time.monotonic()
    try:
        for step in steps:
            hvd.synchronize(begin(step, hvd.global_process_set, hvd.rank(), False))
    except hvd.HorovodInternalError as error:
        return End(str(error), time.monotonic() - start)
    return End("", time.monotonic() - start)


def wrong_with(ends: list[End], step: Step, culprit: int) -> str:
    """Returns what is wrong, or "". Every rank must be told of the culprit, and all other ranks of
    the call."""
    for rank, end in enumerate(ends):
        if f"rank {culprit}" not in end.message or (
            rank != culprit and f"{step.kind} {step.name!r}" not in end.message
        ):
            return f"rank {rank}: {end}"
    return ""


def main() -> None:
    first = int(sys.argv[1])
    programs = int(sys.argv[2])
    out = Path(sys.argv[3])
    torch.set_num_threads(1)
    hvd.init()
    failures = dict[str, str]()
    slowest_s = 0.0
    for seed in range(first, first + programs):
        dice = random.Random(seed)
        planned = steps_of(dice, [list(range(hvd.size()))], True, seed)
        planned += [Step("allreduce", "float32", (3,), "Sum", 0, 0, f"step {seed}.last")]
        steps = [step._replace(name=f"{step.name} of {seed}") for step in planned]
        culprit = dice.randrange(hvd.size())
        place = dice.randrange(len(steps) - 1)
        fault = FAULTS[seed % len(FAULTS)]
        ends = [
            End(*end)
            for end in hvd.allgather_object(
                tuple(end_of(with_fault(steps, place, fault) if hvd.rank() == culprit else steps))
            )
        ]
        slowest_s = max(slowest_s, *(end.seconds for end in ends))
        if wrong := wrong_with(ends, steps[place], culprit):
            failures[f"{seed}, {fault} on rank {culprit}"] = wrong
    if hvd.rank() == 0:
        print(f"{programs} programs, the slowest ended after {slowest_s:.1f} s")
        out.write_text(json.dumps({"wrong": failures, "slowest_s": slowest_s}))


if __name__ == "__main__":
    main()
