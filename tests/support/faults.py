"""Jobs that are damaged and started again: what it cost, and whether they end as a job without
damage."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from ranks import ROOT, Job, Result
from safetensors.numpy import load_file

from hvdtrain.errors import DONE

# steps between two checkpoints, between two sync points, and of an epoch
CHECKPOINT_EVERY = 10
SYNC_EVERY = 10
EPOCH = 60
GLANCE_S = 0.02
GONE_S = 300.0  # after this long a process that is left is an orphan
ENV = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}

Tree = dict[str, Any]


class Command(NamedTuple):
    """The command of a job, the same at every start. An epoch is 60 steps; no job ends by itself
    before its fault, on a slow machine neither."""

    engine: str
    size: int
    words: tuple[str, ...] = ()
    framework: str = "torch"

    def argv(self, run: Path) -> list[str]:
        model = "model.name=linear" if self.framework == "numpy" else "model.name=trouble:Trouble"
        data = [
            "data.name=synthetic",
            "data.shape=[16,16,3]",
            "data.samples=960",
            "data.val_samples=64",
            "batch.size=16",
            "batch.evaluate=1",
        ]
        intervals = [
            "epochs=1000000",
            f"checkpoint.every_steps={CHECKPOINT_EVERY}",
            f"log.every_steps={SYNC_EVERY}",
            "guard.equal_steps=10",
        ]
        job = [
            f"comm.engine={self.engine}",
            f"framework={self.framework}",
            model,
            "optim.name=adam",
            "optim.base_lr=0.002",
            f"run={run}",
        ]
        return ["-m", "hvdtrain", *data, *intervals, *job, *self.words]

    def start(self, run: Path, env: Mapping[str, str] | None = None) -> Job:
        return Job(self.size, self.argv(run), env={**ENV, **(env or {})}, is_warm=True)

    def up_to(self, steps: int) -> Command:
        """The command of a job of so many steps in all."""
        return self._replace(words=(*self.words, f"stop.steps={steps}"))

    def finish(self, run: Path, code: int = DONE) -> Result:
        """Starts it, and expects this exit code."""
        with self.start(run) as job:
            result = job.wait()
        assert result.returncode == code, result
        return result


class Row(NamedTuple):
    """A line of the table."""

    engine: str
    ranks: int
    fault: str
    seconds: list[float]  # of each trial, from the fault until every process of the job is gone
    lost: int | None = None  # steps, at most
    equal: bool | None = (
        None  # final weights, optimizer state and sums equal the uninterrupted run's bit for bit
    )
    codes: list[int] | None = None  # exit codes of the launcher that were seen


def record(row: Row) -> None:
    """Prints the row, and appends it to the file $HVDTRAIN_FAULTS_OUT as a JSON line."""
    s = row.seconds
    spread = f"{min(s):.1f}-{statistics.median(s):.1f}-{max(s):.1f} s" if s else "no end"
    print(
        f"{row.engine} x {row.ranks}: {row.fault}: {len(s)} ends, {spread}, lost {row.lost}, "
        f"equal {row.equal}, codes {row.codes}"
    )
    if out := os.environ.get("HVDTRAIN_FAULTS_OUT"):
        with Path(out).open("a") as file:
            file.write(json.dumps(row._asdict()) + "\n")


def events(run: Path) -> list[Tree]:
    """Returns the events of the job."""
    return json_lines(run / "events.jsonl")


def told(run: Path) -> list[Tree]:
    """What a supervisor has decided."""
    return json_lines(run / "launch.jsonl")


def json_lines(path: Path) -> list[Tree]:
    """Complete lines only: a running job may be writing one, and SIGKILL may cut one off at the end
    of a page, which readers skip."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = list[Tree]()
    cut_off = 0
    for line in lines:
        try:
            found += [json.loads(line)] if line.endswith("\n") else []
        except json.JSONDecodeError:
            cut_off += 1
    assert cut_off <= 1, path
    return found


def reached(run: Path, since: int = 0) -> int:
    """The step of the last sync point among the events from number `since` on."""
    return max(
        (e["step"] for e in events(run)[since:] if e["kind"] in ("start", "step")), default=0
    )


def newest(run: Path) -> int:
    """The step of the newest checkpoint."""
    return max(
        (
            int(path.name[5:])
            for path in (run / "checkpoints").glob("step-*")
            if path.name[5:].isdecimal()
        ),
        default=0,
    )


def outcome(run: Path) -> Tree:
    """What must not depend on interruptions: the last checkpoint, the loss at every sync point, and
    every epoch."""
    folder = run / "checkpoints" / f"step-{newest(run):08d}"
    numbers = json.loads((folder / "progress.json").read_text())
    # its sums are empty after the last evaluation, full before
    train_state = numbers["train_state"]
    arrays = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("weights.safetensors", "optimizer.safetensors")
    }
    losses = {
        (e["kind"], e["step"]): [e.get(key) for key in _LOSSES]
        for e in events(run)
        if e["kind"] in ("step", "epoch")
    }
    return (
        arrays
        | {key: train_state[key] for key in ("progress", "nonfinite", "lr", "batch")}
        | {"losses": losses}
    )


_LOSSES = ("loss", "lr", "batch", "train_loss", "val_loss", "val_accuracy")


def same_end(run: Path, other: Path, step: int) -> None:
    """Up to rounding: weights and optimizer state after `step` steps, and the loss at every sync
    point."""
    for name in ("weights", "optimizer"):
        found, wanted = (
            load_file(path / "checkpoints" / f"step-{step:08d}" / f"{name}.safetensors")
            for path in (run, other)
        )
        assert found.keys() == wanted.keys() and wanted
        for key, array in wanted.items():
            np.testing.assert_allclose(found[key], array, rtol=1e-12, atol=1e-14, err_msg=key)
    losses, expected = (
        {e["step"]: e["loss"] for e in events(path) if e["kind"] == "step"} for path in (run, other)
    )
    assert losses == pytest.approx(expected, rel=1e-12) and len(losses) >= step / 10


@functools.cache
def straight(command: Command) -> Tree:
    """The outcome of the uninterrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        command.finish(Path(folder) / "run")
        return outcome(Path(folder) / "run")


def next_end(run: Path) -> int:
    """The step at which the epoch ends after all that the job has reached: there a job that had its
    faults may end. A killed job may have reached the epoch after that of its newest checkpoint, and
    its events of those steps stay in the file."""
    return EPOCH * (max(newest(run), reached(run)) // EPOCH + 1)


def ends_as_straight(command: Command, run: Path) -> bool:
    """Starts the job once more, up to its next epoch's end: whether it ends as one that never
    stopped."""
    last = command.up_to(next_end(run))
    last.finish(run)
    found, wanted = outcome(run), straight(last)
    assert found["losses"] == wanted["losses"]  # the message names the first that differs
    return found == wanted


def wait_for(job: Job, condition: Callable[[], object], limit_s: float = 300) -> None:
    """Until the condition holds, while the job is alive."""
    for turn in range(int(limit_s / GLANCE_S)):
        if condition():
            return
        time.sleep(GLANCE_S)
        assert turn % 50 < 49 or job.processes(), f"the job ended before: {job.wait()}"
    raise AssertionError(f"waited {limit_s:g} s: {job.output()}")


def said_by_ranks(result: Result) -> str:
    """Returns the standard error without what mpirun appends if an exit code is not 0."""
    return result.stderr.partition("-" * 74)[0]


def gone(job: Job, since_s: float, limit_s: float = GONE_S) -> float:
    """Seconds from since_s (of time.monotonic) until every process of the job is gone."""
    while job.processes():
        assert time.monotonic() < since_s + limit_s, (
            f"orphans after {limit_s:g} s: {job.processes()}; {job.output()}"
        )
        time.sleep(2 * GLANCE_S)
    return time.monotonic() - since_s


def once(job: Job, find: Callable[[], int | None]) -> int:
    """Waits for find() to return a pid, and returns it. The pid is never 0 or less, which would
    signal a group of processes: the tests' own."""
    found: list[int] = []

    def look() -> bool:
        pid = find()
        found.extend([pid] if pid is not None and pid > 0 else [])
        return bool(found)

    wait_for(job, look)
    return found[0]


def launcher(job: Job) -> int:
    """The pid of mpirun, once it is there."""
    return once(
        job,
        lambda: next(
            (
                pid
                for pid in sorted(job.processes())
                if _name(pid) in ("mpirun", "prterun", "orterun")
            ),
            None,
        ),
    )


def supervisor(job: Job) -> int:
    """The pid of `launch --elastic`."""
    return next(
        pid
        for pid in sorted(job.processes())
        if b"\0--elastic\0" in _cmdline(pid) and not _cmdline(pid).startswith(b"timeout")
    )


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class Kill(NamedTuple):
    """One SIGKILL."""

    rank: int  # -1: of mpirun
    steps: int  # after that many more steps; 0: in the start
    pause_s: float  # and then this long


class Trial(NamedTuple):
    """What one SIGKILL did."""

    seconds: float
    lost: int  # steps
    code: int
    what: Kill


def kills(seed: int, size: int, count: int) -> list[Kill]:
    """Yields kills of rank 0, of mpirun and of another rank in turn; three of nine turns are during
    the start."""
    random = Random(seed)
    plan = list[Kill]()
    for turn in range(count):
        rank = (0, -1, random.randrange(1, size))[turn % 3]
        early = turn % 9 in (3, 4, 5)
        plan.append(
            Kill(
                rank,
                0 if early else random.randrange(1, 40),
                random.uniform(0, 0.5 if early else 0.03),
            )
        )
    return plan


def kill(command: Command, run: Path, what: Kill) -> Trial:
    """Starts the command, waits for the moment, kills, and waits until all is gone."""
    before = newest(run)
    begun = len(events(run))
    with command.start(run) as job:
        pid = launcher(job) if what.rank < 0 else once(job, lambda: job.pids().get(what.rank))
        wait_for(job, lambda: not what.steps or reached(run, begun) >= before + what.steps)
        time.sleep(what.pause_s)
        job.processes()  # so that none is forgotten that loses its parent
        os.kill(pid, signal.SIGKILL)
        seconds = gone(job, time.monotonic())
        code = job.wait().returncode
    starts = [e["step"] for e in events(run)[begun:] if e["kind"] == "start"]
    assert starts in ([], [before]), (starts, before, "it goes on from the newest checkpoint")
    return Trial(seconds, max(0, reached(run, begun) - newest(run)), code, what)
