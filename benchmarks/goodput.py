"""Goodput of real jobs whose ranks are killed at random times, beside what the simulation of `plan --faults` says of the same faults.

python benchmarks/goodput.py [--ranks 3] [--faults 4] [--mtbf 15] [--seeds 1,2] [--lost stop,restart,shrink]
                             [--out FILE.jsonl] [key=value ...]

A job under launch --elastic has so many faults, each an exponential time (seeded) after the job goes on from the one before. A fault kills
one rank; where the job starts on more ranks at that moment, it waits for the first steps. Goodput: steps that are kept x seconds of a step
where nothing happens / wall time, from the first sync point to the first one of all ranks after the last fault. The simulation gets the
times measured in that job (checkpoints, sync points, detection, starts, the mean gap), not its goodput; "5 to 95 %" is of 1,000 simulated
jobs of so many faults.
"""

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from faults import events, supervisor, told, wait_for
from ranks import Job

from hvdtrain.cli.drill.command import measure, step_of
from hvdtrain.cli.plan.faults import FaultTimes, simulate_last_checkpoints, simulate_restarts, simulate_shrink

WORDS = "data.name=synthetic data.shape=[16,16,3] data.samples=64000 data.val_samples=64 batch.size=64 batch.evaluate=64 epochs=100"
MODEL = "model.name=linear log.every_steps=10 comm.engine=mpi framework=numpy"
CHECKPOINT_STEPS = 300
EVERY_S = 1.0  # of the supervisor's looks: a rank comes back after two
Event = dict[str, Any]


def one_job(run: Path, lost: str, options: argparse.Namespace, seed: int, words: list[str]) -> dict[str, Any]:
    """A row of the table."""
    random, load = Random(seed), os.getloadavg()[0]
    (run.parent / "hosts").write_text(f"localhost slots={options.ranks}\n")
    launch = ["launch", "--elastic", "--every", f"{EVERY_S:g}", "--max", str(options.ranks), "--hostfile", str(run.parent / "hosts")]
    job_words = [f"run={run}", *WORDS.split(), *MODEL.split(), f"checkpoint.every_steps={CHECKPOINT_STEPS}", f"guard.lost={lost}", *words]
    with Job(0, ["-m", "hvdtrain", *launch, "--", *job_words], timeout_s=600) as job:
        trains = lambda: [line["kind"] for line in told(run)][-1:] == ["trains"] and told(run)[-1]["ranks"] == options.ranks  # noqa: E731
        wait_for(job, lambda: trains() and any(event["kind"] == "step" for event in events(run)), 120)
        killed = []
        for _ in range(options.faults):
            time.sleep(random.expovariate(1 / options.mtbf))
            wait_for(job, lambda: is_training(run) and job.pids(), 120)  # guard.lost=shrink: it may be starting on all ranks
            pids, killed_s = job.pids(), time.time()
            killed.append(killed_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[random.choice(sorted(pids))], signal.SIGKILL)
            wait_for(job, lambda at_s=killed_s: harm_of(events(run), told(run), at_s), 120)
        wait_for(job, lambda: trains() and told(run)[-1]["time"] > killed[-1] + 0.5 and events(run)[-1]["kind"] == "step", 120)
        happened, decisions = events(run), told(run)
        os.kill(supervisor(job), signal.SIGTERM)
        job.wait()
    row = {"lost": lost, "seed": seed, "ranks": options.ranks}
    return row | judge(happened, decisions, killed, lost, options.ranks) | {"load": round(load, 1)}


def is_training(run: Path) -> bool:
    return next((e["kind"] for e in reversed(events(run)) if e["kind"] in ("start", "step", "lost", "stop")), "") in ("step", "lost")


def next_step(happened: list[Event], after_s: float) -> Event:
    return next(event for event in happened if event["kind"] == "step" and event["time"] > after_s)


def judge(happened: list[Event], decisions: list[Event], killed: list[float], lost: str, ranks: int) -> dict[str, Any]:
    """Goodput, what the simulation says of it, and the times that it was given."""
    step_s, fewer_step_s = (seconds_per_step(happened, ranks, all_there) for all_there in (True, False))
    first = next_step(happened, 0.0)
    begun_s = max(event["time"] for event in happened if event["kind"] in ("start", "lost"))
    last = next_step(happened, begun_s)
    goodput = (last["step"] - first["step"]) * step_s / (last["time"] - first["time"])
    pauses_s = [event["pause_s"] for event in happened if event["kind"] == "checkpoint"]
    sync_s, checkpoint_s = 10 * step_s, statistics.mean(pauses_s or [0.0])
    harms = [harm_of(happened, decisions, killed_s) for killed_s in killed]
    ready_s = [first["time"], *(killed_s + harm.go_on_s for killed_s, harm in zip(killed, harms, strict=True))]
    gaps_s = [killed_s - since_s for killed_s, since_s in zip(killed, ready_s, strict=False)]
    mtbf_s = statistics.mean(gaps_s)
    detect_s = statistics.mean(harm.detect_s for harm in harms)
    down_s = statistics.mean(harm.go_on_s - sync_s - harm.detect_s for harm in harms)
    starts_s = [later["time"] - line["time"] for line, later in following(decisions, "change", "trains")]
    restart_s = statistics.mean(starts_s) if lost == "shrink" and starts_s else down_s
    every_s = CHECKPOINT_STEPS * step_s
    lost_speed = 1.0 if math.isnan(fewer_step_s) else ranks * (1 - step_s / fewer_step_s)
    times = FaultTimes(
        rank_mtbf_hours=ranks * mtbf_s / 3600,
        checkpoint_s=checkpoint_s,
        sync_s=sync_s,
        detect_s=detect_s,
        restart_s=restart_s,
        reform_s=max(0.0, down_s),
        repair_s=2 * EVERY_S,
        lost_speed=lost_speed,
    )

    def simulated(faults: int, random: Random) -> float:
        if lost == "stop":
            return simulate_restarts(every_s, checkpoint_s, mtbf_s, detect_s + restart_s, random, faults, while_down=False)
        if lost == "restart":
            return simulate_last_checkpoints(times, mtbf_s, every_s, random, faults, while_down=False)
        return simulate_shrink(times, ranks, every_s, random, faults)

    draws = Random(1)
    likely = statistics.quantiles([simulated(len(killed), draws) for _ in range(1000)], n=20)
    predicted = simulated(20000, Random(1))
    rounded = {key: round(value, 4) for key, value in times._asdict().items()}
    return {
        "goodput": round(goodput, 4),
        "predicted": round(predicted, 4),
        "5 to 95 %": [round(likely[0], 4), round(likely[-1], 4)],
        "mtbf_s": round(mtbf_s, 2),
        "wall_s": round(last["time"] - first["time"], 1),
        "faults": len(killed),
        "step_s": round(step_s, 5),
        "fewer_ranks_step_s": None if math.isnan(fewer_step_s) else round(fewer_step_s, 5),
        "every_s": round(every_s, 2),
        "steps_lost": [harm.steps_lost for harm in harms],
        "times": rounded,
    }


def harm_of(happened: list[Event], decisions: list[Event], killed_s: float) -> Any:
    step = step_of([event for event in happened if event["time"] <= killed_s])
    later = [event for event in happened if event["time"] > killed_s]
    return measure([], step, killed_s, later, [line for line in decisions if line["time"] > killed_s])


def following(lines: list[Event], first: str, second: str) -> list[tuple[Event, Event]]:
    """Each line of the first kind, and the next of the second."""
    found = []
    for number, line in enumerate(lines):
        if line["kind"] == first and (later := next((later for later in lines[number:] if later["kind"] == second), None)):
            found.append((line, later))
    return found


def seconds_per_step(happened: list[Event], ranks: int, all_there: bool) -> float:
    """Mean over the intervals between two sync points in which nothing else happened; nan: there are none."""
    here, seconds, steps = ranks, 0.0, 0
    for one, two in itertools.pairwise(happened):
        here = one["ranks"] if one["kind"] == "start" else one["left"] if one["kind"] == "lost" else here
        if one["kind"] == two["kind"] == "step" and (here == ranks) == all_there:
            seconds, steps = seconds + two["time"] - one["time"], steps + two["step"] - one["step"]
    return seconds / steps if steps else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--faults", type=int, default=4)
    parser.add_argument("--mtbf", type=float, default=15.0, help="seconds")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--lost", default="stop,restart,shrink")
    parser.add_argument("--out")
    options, words = parser.parse_known_args()
    machine = {"machine": platform.machine(), "processors": os.cpu_count(), "words": words}
    for seed in map(int, options.seeds.split(",")):
        for lost in options.lost.split(","):
            with tempfile.TemporaryDirectory() as folder:
                row = one_job(Path(folder) / "run", lost, options, seed, words)
            print(*(f"{key}={row[key]}" for key in row), flush=True)
            if options.out:
                date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                with open(options.out, "a") as file:
                    file.write(json.dumps(row | machine | {"date": date}) + "\n")


if __name__ == "__main__":
    main()
