"""Kills ranks, one after the other or two at once, while guard.lost=shrink continues: the cost, and
the final result.

python benchmarks/lost_ranks.py [--kills 30] [--engine mpi | torchdist] [--framework numpy | torch] [--seed 0] [--ranks 4 | 2,3,4]
                                [--out FILE.jsonl] [key=value ...]

Runs a chain of jobs with the given numbers of ranks. Each job loses ranks until one is left or the
job ends. A kill is one of

    a rank, rank 0, two at once    at a random moment
    evaluation, checkpoint         inside the evaluation of a random number, or while rank 0 writes a checkpoint
    re-form                        while the others go on without one that was killed just before

Each job's weights are compared with one process's. A line of FILE is a loss: seconds from the first
failed collective until training continues (go_on_s), and until the first sync point after it
(first_s). Other arguments are a job's (shard.stage=1 checkpoint.every_steps=10). If a job ends
early, the last line has its exit codes: 84 if all copies of some parts are lost and there is no
checkpoint yet.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from faults import events
from lost_ranks import arguments, difference, outcome, start, undisturbed

PAUSES_S = (0.02, 0.6)  # between two kills at random moments
STARTS_S = 90
LENGTH = {
    "numpy": "epochs=80 log.every_steps=5 checkpoint.every_steps=50",
    "torch": "epochs=25 log.every_steps=5 checkpoint.every_steps=50",
}
# calls of functions: tests/support/killed_ranks.py
REFORM = (
    "shrink 1",
    "memory_copy.py:restore 1",
    "elastic_job.py:take_over 1",
)


class Kill(NamedTuple):
    """A kill of one or two ranks: from outside at a random moment, or by the rank itself in a call
    of a function."""

    kind: str
    outside: tuple[int, ...] = ()
    inside: str = ""


def choose(ranks: int, chance: random.Random) -> list[Kill]:
    """Kills of all ranks but one, in a random order."""
    left = chance.sample(range(ranks), ranks - 1)
    found = list[Kill]()
    while left:
        rank = left.pop()
        kinds = [
            "rank 0" if rank == 0 else "a rank",
            "evaluation",
            *(["two at once", "re-form"] if left else []),
            *(["checkpoint"] * (rank == 0)),
        ]
        kind = chance.choice(kinds)
        if kind == "evaluation":
            found.append(Kill(kind, inside=f"{rank} loop.py:evaluate {chance.randint(1, 12)}"))
        elif kind == "checkpoint":
            found.append(Kill(kind, inside=f"{rank} saver.py:_write {chance.randint(1, 3)}"))
        elif kind == "two at once":
            found.append(Kill(kind, outside=(rank, left.pop())))
        elif kind == "re-form":
            found.append(
                Kill(kind, outside=(left.pop(),), inside=f"{rank} {chance.choice(REFORM)}")
            )
        else:
            found.append(Kill(kind, outside=(rank,)))
    return found


def kill_from_outside(
    jobs: Sequence[Any], run: Path, chance: random.Random, kills: Sequence[Kill], deadline: float
) -> None:
    """From the first steps on."""
    while not any(event["kind"] == "step" for event in events(run)):
        time.sleep(0.01)
        if time.monotonic() > deadline:
            return
    pids = {rank: pid for job in jobs for rank, pid in job.pids().items()}
    for kill in kills:
        if any(event["kind"] == "end" for event in events(run)[-2:]):
            return
        if kill.outside:
            time.sleep(chance.uniform(*PAUSES_S))
        for rank in kill.outside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)


def one_job(
    chosen: argparse.Namespace, words: str, run: Path, chance: random.Random, last: Any
) -> tuple[list[dict[str, Any]], str]:
    """The losses of one job, and the exit codes of one that has not come to its end."""
    ranks = chance.choice(chosen.ranks)
    kills = choose(ranks, chance)
    plan = ", ".join(kill.inside for kill in kills if kill.inside) or "-"
    kind_of = {
        rank: kill.kind
        for kill in kills
        for rank in (*kill.outside, *([int(kill.inside.split()[0])] if kill.inside else []))
    }
    with contextlib.ExitStack() as stack:
        argv = arguments(
            chosen.framework, run, f"guard.lost=shrink {LENGTH[chosen.framework]} {words}", plan
        )
        jobs = start(chosen.engine, ranks, argv, stack)
        kill_from_outside(jobs, run, chance, kills, time.monotonic() + STARTS_S)
        results = [job.wait() for job in jobs]
        codes = [result.returncode for result in results]
    off = difference(last, outcome(run))
    told = events(run)
    rows = []
    for number, event in enumerate(told):
        if event["kind"] == "lost":
            after = next(
                (later for later in told[number:] if later["kind"] in ("step", "end")), event
            )
            rows.append(
                {
                    key: event[key]
                    for key in (
                        "ranks",
                        "left",
                        "detect_s",
                        "go_on_s",
                        "steps_lost",
                        "restored_from",
                    )
                }
                | {"kinds": sorted({kind_of[rank] for rank in event["ranks"]})}
                | {
                    "first_s": round(event["go_on_s"] + after["time"] - event["time"], 3),
                    "of": ranks,
                    "off": off,
                    "codes": codes,
                }
            )
    losses = ", ".join(f"{row['ranks']} ({' and '.join(row['kinds'])})" for row in rows)
    print(
        f"{run.name}: {ranks} ranks, lost {losses or 'none'}, exit codes {codes}, {off:.1e} from "
        "one process",
        flush=True,
    )
    if not off <= 1e-12:
        print(
            plan,
            *(result.stdout[-1500:] + result.stderr[-3000:] for result in results),
            sep="\n",
            flush=True,
        )
    codes_told = sorted({code for code in codes if code != -signal.SIGKILL})
    return rows, "" if off < math.inf else f"{codes_told}"


def write(
    chosen: argparse.Namespace,
    overrides: Sequence[str],
    load: float,
    rows: Sequence[dict[str, Any]],
) -> None:
    """Writes a line for each loss if --out names a file."""
    machine = platform.processor() or platform.machine()
    head = {
        "engine": chosen.engine,
        "framework": chosen.framework,
        "seed": chosen.seed,
        "words": overrides,
        "machine": machine,
    }
    head |= {
        "load": round(load, 1),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if chosen.out:
        with open(chosen.out, "a") as file:
            file.writelines(json.dumps(head | row) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30, help="at least so many ranks")
    parser.add_argument("--engine", default="mpi")
    parser.add_argument("--framework", default="numpy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ranks", type=lambda text: [int(word) for word in text.split(",")], default=[4]
    )
    parser.add_argument("--out")
    chosen, overrides = parser.parse_known_args()
    chance = random.Random(chosen.seed)
    rows = list[dict[str, Any]]()
    words = " ".join(overrides)
    with tempfile.TemporaryDirectory() as folder:
        rule = " ".join(word for word in overrides if word.startswith("optim."))
        last = undisturbed(
            chosen.framework, Path(folder) / "one", f"{LENGTH[chosen.framework]} {rule}"
        )
        number = 0
        broken = list[str]()
        while sum(len(row["ranks"]) for row in rows) < chosen.kills:
            number += 1
            found, codes = one_job(chosen, words, Path(folder) / f"job-{number}", chance, last)
            rows += found
            write(chosen, overrides, os.getloadavg()[0], found)
            broken += [codes] * bool(codes)
    print(f"{'':12}{'n':>5}{'quartiles, ms':>24}{'largest':>9}")
    for name in ("detect_s", "go_on_s", "first_s"):
        each = [1e3 * row[name] for row in rows]
        quartiles = " ".join(f"{quartile:7.1f}" for quartile in statistics.quantiles(each, n=4))
        print(f"{name[:-2]:12}{len(each):5}{quartiles:>24}{max(each):9.1f}")
    kills = sum(len(row["ranks"]) for row in rows)
    off = max(row["off"] for row in rows if row["off"] < math.inf)
    most = max((row["steps_lost"] for row in rows if row["restored_from"] == "memory"), default=0)
    print(
        f"{kills} ranks lost in {number} jobs, at most {most} steps repeated, at most {off:.1e} "
        "from one process"
    )
    print(
        ", ".join(
            f"{kind} {n}"
            for kind, n in sorted(Counter(kind for row in rows for kind in row["kinds"]).items())
        )
    )
    print(
        ", ".join(
            f"from {source} {n}"
            for source, n in sorted(Counter(row["restored_from"] for row in rows).items())
        )
    )
    print(
        "exit codes of jobs that did not come to their end:",
        ", ".join(f"{c} {n}" for c, n in sorted(Counter(broken).items())) or "none",
    )


if __name__ == "__main__":
    main()
