"""Goodput of real jobs whose ranks are killed at random times, compared with the simulation of
`plan --faults` for the same faults.

python benchmarks/goodput.py [--ranks 3] [--faults 4] [--mtbf 15] [--seeds 1,2] [--lost stop,restart,shrink]
                             [--out FILE.jsonl] [key=value ...]

A job under launch --elastic has --faults faults. Each occurs an exponential time with mean --mtbf
(seeded) after the job continued from the previous fault. A fault kills one rank, while the job
trains. A pass sleeps for each sample, so ranks are as fast as separate machines. Goodput: kept
steps x seconds of an undisturbed step / wall time, from the first sync point to the first one of
all ranks after the last fault. A job's prediction uses --mtbf and the mean times of the other
seeds' jobs (checkpoints, detection, starts). "5 to 95 %" is the range of 1,000 simulated jobs with
as many faults.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from faults import events, supervisor, told, wait_for
from ranks import Job

from hvdtrain.extras.drill.command import measure, step_of
from hvdtrain.extras.plan.faults import (
    FaultTimes,
    simulate_last_checkpoints,
    simulate_restarts,
    simulate_shrink,
)

WORDS = (
    "data.name=synthetic data.shape=[16,16,3] data.samples=64000 data.val_samples=64 "
    "batch.size=64 batch.evaluate=64 epochs=100"
)
SYNC_STEPS = 10
MODEL = (
    f"model.name=goodput:Paced model.sample_s=0.0005 log.every_steps={SYNC_STEPS} comm.engine=mpi"
)
ENV = {
    "PYTHONPATH": os.pathsep.join(
        str(Path(__file__).resolve().parents[folders]) for folders in (0, 1)
    ),
    "OMP_NUM_THREADS": "1",
}
CHECKPOINT_STEPS = 300
EVERY_S = 1.0  # of the supervisor's looks: a rank comes back after two
Event = dict[str, Any]


class Paced(torch.nn.Module):
    """A linear model whose training passes sleep for each sample, so a rank is as fast as a
    separate machine."""

    def __init__(self, shape: tuple[int, ...], classes: int, sample_s: float = 0.0) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(math.prod(shape), classes)
        self.sample_s = sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.sample_s * len(x))
        return self.linear(x.flatten(1))


def one_job(
    run: Path, lost: str, options: argparse.Namespace, seed: int, words: list[str]
) -> dict[str, Any]:
    """A row of the table."""
    random = Random(seed)
    load = os.getloadavg()[0]
    (run.parent / "hosts").write_text(f"localhost slots={options.ranks}\n")
    launch = [
        "launch",
        "--elastic",
        "--every",
        f"{EVERY_S:g}",
        "--max",
        str(options.ranks),
        "--hostfile",
        str(run.parent / "hosts"),
    ]
    job_words = [
        f"run={run}",
        *WORDS.split(),
        *MODEL.split(),
        f"checkpoint.every_steps={CHECKPOINT_STEPS}",
        f"guard.lost={lost}",
        *words,
    ]
    with Job(0, ["-m", "hvdtrain", *launch, "--", *job_words], timeout_s=600, env=ENV) as job:

        def trains() -> bool:
            lines = told(run)
            return (
                bool(lines)
                and lines[-1]["kind"] == "trains"
                and lines[-1]["ranks"] == options.ranks
            )

        wait_for(
            job, lambda: trains() and any(event["kind"] == "step" for event in events(run)), 120
        )
        killed = []
        for _ in range(options.faults):
            time.sleep(random.expovariate(1 / options.mtbf))
            # guard.lost=shrink: it may be starting on all ranks
            wait_for(job, lambda: is_training(run) and job.pids(), 120)
            pids = job.pids()
            killed_s = time.time()
            killed.append(killed_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[random.choice(sorted(pids))], signal.SIGKILL)
            wait_for(job, lambda at_s=killed_s: harm_of(events(run), told(run), at_s), 120)
        wait_for(
            job,
            lambda: (
                trains()
                and told(run)[-1]["time"] > killed[-1] + 0.5
                and events(run)[-1]["kind"] == "step"
            ),
            120,
        )
        happened = events(run)
        decisions = told(run)
        os.kill(supervisor(job), signal.SIGTERM)
        job.wait()
    row = {"lost": lost, "seed": seed, "ranks": options.ranks}
    return row | judge(happened, decisions, killed, lost, options.ranks) | {"load": round(load, 1)}


def is_training(run: Path) -> bool:
    return next(
        (
            e["kind"]
            for e in reversed(events(run))
            if e["kind"] in ("start", "step", "lost", "stop")
        ),
        "",
    ) in ("step", "lost")


def next_step(happened: list[Event], after_s: float) -> Event:
    return next(event for event in happened if event["kind"] == "step" and event["time"] > after_s)


def judge(
    happened: list[Event], decisions: list[Event], killed: list[float], lost: str, ranks: int
) -> dict[str, Any]:
    """Goodput of a job, and the times that a prediction takes."""
    step_s, fewer_step_s = (
        seconds_per_step(happened, ranks, all_there) for all_there in (True, False)
    )
    first = next_step(happened, 0.0)
    begun_s = max(event["time"] for event in happened if event["kind"] in ("start", "lost"))
    last = next_step(happened, begun_s)
    goodput = (last["step"] - first["step"]) * step_s / (last["time"] - first["time"])
    pauses_s = [event["pause_s"] for event in happened if event["kind"] == "checkpoint"]
    harms = [harm_of(happened, decisions, killed_s) for killed_s in killed]
    detect_s = statistics.mean(harm.detect_s for harm in harms)
    down_s = statistics.mean(harm.go_on_s - SYNC_STEPS * step_s - harm.detect_s for harm in harms)
    starts_s = [
        later["time"] - line["time"] for line, later in following(decisions, "change", "trains")
    ]
    return {
        "goodput": round(goodput, 4),
        "wall_s": round(last["time"] - first["time"], 1),
        "faults": len(killed),
        "steps_lost": [harm.steps_lost for harm in harms],
        "step_s": step_s,
        "fewer_ranks_step_s": fewer_step_s,
        "checkpoint_s": statistics.mean(pauses_s or [0.0]),
        "detect_s": detect_s,
        "down_s": max(0.0, down_s),
        "restart_s": statistics.mean(starts_s)
        if lost == "shrink" and starts_s
        else max(0.0, down_s),
    }


def predict(row: dict[str, Any], others: list[dict[str, Any]], mtbf_s: float) -> dict[str, Any]:
    """Predicts the goodput of this row's job from the times of other jobs: the long-run value, and
    the range of 90 % of jobs with as many faults."""
    mean = {
        key: statistics.mean(other[key] for other in others)
        for key in ("step_s", "checkpoint_s", "detect_s", "down_s", "restart_s")
    }
    fewer = [
        other["fewer_ranks_step_s"]
        for other in others
        if not math.isnan(other["fewer_ranks_step_s"])
    ]
    ranks = row["ranks"]
    faults = row["faults"]
    every_s = CHECKPOINT_STEPS * mean["step_s"]
    times = FaultTimes(
        rank_mtbf_hours=ranks * mtbf_s / 3600,
        checkpoint_s=mean["checkpoint_s"],
        sync_s=SYNC_STEPS * mean["step_s"],
        detect_s=mean["detect_s"],
        restart_s=mean["restart_s"],
        reform_s=mean["down_s"],
        repair_s=2 * EVERY_S,
        lost_speed=ranks * (1 - mean["step_s"] / statistics.mean(fewer)) if fewer else 1.0,
    )

    def simulated(faults: int, random: Random) -> float:
        if row["lost"] == "stop":
            down_s = times.detect_s + times.restart_s
            return simulate_restarts(
                every_s, times.checkpoint_s, mtbf_s, down_s, random, faults, while_down=False
            )
        if row["lost"] == "restart":
            return simulate_last_checkpoints(
                times, mtbf_s, every_s, random, faults, while_down=False
            )
        return simulate_shrink(times, ranks, every_s, random, faults)

    draws = Random(1)
    likely = statistics.quantiles([simulated(faults, draws) for _ in range(1000)], n=20)
    given = {key: round(value, 4) for key, value in times._asdict().items()}
    return {
        "predicted": round(simulated(20000, Random(1)), 4),
        "5 to 95 %": [round(likely[0], 4), round(likely[-1], 4)],
        "times": given,
    }


def harm_of(happened: list[Event], decisions: list[Event], killed_s: float) -> Any:
    step = step_of([event for event in happened if event["time"] <= killed_s])
    later = [event for event in happened if event["time"] > killed_s]
    return measure(
        [], step, killed_s, later, [line for line in decisions if line["time"] > killed_s]
    )


def following(lines: list[Event], first: str, second: str) -> list[tuple[Event, Event]]:
    """Each line of the first kind, and the next of the second."""
    found = []
    for number, line in enumerate(lines):
        if line["kind"] == first and (
            later := next((later for later in lines[number:] if later["kind"] == second), None)
        ):
            found.append((line, later))
    return found


def seconds_per_step(happened: list[Event], ranks: int, all_there: bool) -> float:
    """Mean over the intervals between two sync points in which nothing else happened; nan: there
    are none."""
    here = ranks
    seconds = 0.0
    steps = 0
    for one, two in itertools.pairwise(happened):
        here = (
            one["ranks"]
            if one["kind"] == "start"
            else one["left"]
            if one["kind"] == "lost"
            else here
        )
        if one["kind"] == two["kind"] == "step" and (here == ranks) == all_there:
            seconds = seconds + two["time"] - one["time"]
            steps = steps + two["step"] - one["step"]
    return seconds / steps if steps else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--faults", type=int, default=4)
    parser.add_argument("--mtbf", type=float, default=15.0, help="seconds")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--lost", default="stop,restart,shrink")
    parser.add_argument("--out")
    options, words = parser.parse_known_args()
    machine = {
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "words": words,
        "mtbf_s": options.mtbf,
    }
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if len(seeds) < 2:
        parser.error("--seeds: two or more, as the times of the other jobs predict each")
    for lost in options.lost.split(","):
        rows = []
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(one_job(Path(folder) / "run", lost, options, seed, words))
            print(
                f"{lost}, seed {seed}: goodput {100 * rows[-1]['goodput']:.1f} % in "
                f"{rows[-1]['wall_s']} s",
                flush=True,
            )
        for row in rows:
            row.update(predict(row, [other for other in rows if other is not row], options.mtbf))
            low, high = row["5 to 95 %"]
            print(
                f"{lost}, seed {row['seed']}: {100 * row['goodput']:.1f} %, predicted "
                f"{100 * row['predicted']:.1f} %",
                end=" ",
            )
            print(f"({100 * low:.1f} to {100 * high:.1f}), load {row['load']}", flush=True)
        if options.out:
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            with open(options.out, "a") as file:
                file.writelines(json.dumps(row | machine | {"date": date}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
