"""Ranks are killed at random moments, one after the other or two at once, while guard.lost=shrink goes on: what it costs, and the end.

python benchmarks/lost_ranks.py [--kills 30] [--engine mpi | torchdist] [--framework numpy | torch] [--seed 0] [--out FILE.jsonl]

A chain of jobs of 4 ranks; each loses up to 3, until it ends. The weights of each are compared with those of one process. A line of FILE
is a loss: seconds from the first failed collective until training goes on (go_on_s), until the first sync point after it (first_s).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from faults import events
from lost_ranks import arguments, difference, outcome, start, undisturbed

RANKS = 4
PAUSES_S = (0.02, 0.6)  # between two kills
LENGTH = {
    "numpy": "epochs=80 log.every_steps=5 checkpoint.every_steps=50",
    "torch": "epochs=25 log.every_steps=5 checkpoint.every_steps=50",
}


def kill_some(jobs: list[Any], run: Path, chance: random.Random, most: int) -> int:
    """SIGKILLs up to `most` ranks, from the first steps on; returns how many."""
    while not any(event["kind"] == "step" for event in events(run)):
        time.sleep(0.01)
        if time.monotonic() > DEADLINE[0]:
            return 0
    killed: set[int] = set()
    pids = {rank: pid for job in jobs for rank, pid in job.pids().items()}
    while len(killed) < most:
        time.sleep(chance.uniform(*PAUSES_S))
        if any(event["kind"] == "end" for event in events(run)[-2:]):
            break
        at_once = min(chance.choice((1, 1, 1, 2)), most - len(killed))
        for rank in chance.sample(sorted(pids.keys() - killed), at_once):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)
                killed.add(rank)
    return len(killed)


DEADLINE = [0.0]


def one_job(engine: str, framework: str, run: Path, chance: random.Random, most: int, last: Any) -> list[dict[str, Any]]:
    """The losses of one job."""
    DEADLINE[0] = time.monotonic() + 90
    with contextlib.ExitStack() as stack:
        jobs = start(engine, RANKS, arguments(framework, run, f"guard.lost=shrink {LENGTH[framework]}"), stack)
        killed = kill_some(jobs, run, chance, most)
        results = [job.wait() for job in jobs]
        codes = [result.returncode for result in results]
    off = difference(last, outcome(run))
    told = events(run)
    rows = []
    for number, event in enumerate(told):
        if event["kind"] == "lost":
            after = next((later for later in told[number:] if later["kind"] in ("step", "end")), event)
            rows.append(
                {key: event[key] for key in ("ranks", "left", "detect_s", "go_on_s", "steps_lost")}
                | {"first_s": round(event["go_on_s"] + after["time"] - event["time"], 3), "off": off, "codes": codes}
            )
    lost = {rank for row in rows for rank in row["ranks"]}
    print(f"{run.name}: {killed} killed, {len(lost)} lost, exit codes {codes}, {off:.1e} from one process", flush=True)
    if not off <= 1e-12:
        print(*(result.stdout[-1500:] + result.stderr[-3000:] for result in results), sep="\n", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--engine", default="mpi")
    parser.add_argument("--framework", default="numpy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    chosen = parser.parse_args()
    chance, rows = random.Random(chosen.seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        last = undisturbed(chosen.framework, Path(folder) / "one", LENGTH[chosen.framework])
        number = 0
        while sum(len(row["ranks"]) for row in rows) < chosen.kills:
            number += 1
            rows += one_job(chosen.engine, chosen.framework, Path(folder) / f"job-{number}", chance, RANKS - 1, last)
    go_on, first = [1e3 * row["go_on_s"] for row in rows], [1e3 * row["first_s"] for row in rows]
    print(f"{'':12}{'n':>5}{'median ms':>11}{'largest':>9}")
    for name, each in {"go on": go_on, "first sync": first}.items():
        print(f"{name:12}{len(each):5}{statistics.median(each):11.1f}{max(each):9.1f}")
    kills, most, off = sum(len(row["ranks"]) for row in rows), max(row["steps_lost"] for row in rows), max(row["off"] for row in rows)
    print(f"{kills} ranks lost, at most {most} steps repeated, at most {off:.1e} from one process")
    if chosen.out:
        head = {
            "engine": chosen.engine,
            "framework": chosen.framework,
            "seed": chosen.seed,
            "machine": platform.processor() or platform.machine(),
        }
        with open(chosen.out, "a") as file:
            file.writelines(json.dumps(head | row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
