"""Reasons to stop a job early or to roll it back: signals, the time limit, non-finite numbers,
differing replicas.

All ranks make the same decisions: their flags are summed over ranks at sync points.
"""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple, cast

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.sections.guard import GuardConfig
from hvdtrain.core.lengths import parse_duration
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import REQUEUE, Diverged
from hvdtrain.frameworks.learner import HasState, Learner
from hvdtrain.training.checkpoint.checkpoints import Checkpoints
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.replicas.compare import check_equal
from hvdtrain.training.replicas.probe import Probe

_FLAGS = ("stop.signal", "stop.time", "save")


def nonfinite_steps(sums: Sums) -> int:
    """Returns the number of steps since the last sync point whose loss or gradient is not finite,
    from the sums of all ranks."""
    return round(sums["nonfinite"]) or int(not math.isfinite(sums["loss"]))


@dataclass
class HealthMonitor:
    """Decides when a job stops or rolls back; one on each rank."""

    guard: GuardConfig
    communicator: Communicator
    signals: Signals
    heartbeat: Heartbeat
    hosts: list[str]  # of each rank
    checkpoints: Checkpoints
    deadline: Deadline | None = None  # on rank 0, whose clock decides for all
    probe: Probe | None = None  # compares outputs at the next sync point
    longest_s: float = 0.0  # between two updates of the flags
    updated_s: float | None = None  # time.monotonic() of the last update
    stop_request: str = (
        ""  # why the job stops now, to be resumed; empty while it runs. The same on every rank
    )
    stop_code: int = REQUEUE  # the exit code of such a stop
    # the fix in messages about such numbers
    fix: str = (
        "a lower optim.base_lr, a longer recipe.warmup or optim.clip_norm; or "
        "guard.nonfinite=skip or rollback"
    )

    def flags(self, step: int | None = None) -> Sums:
        """Returns this rank's flags, to be summed over ranks: whether it asks to stop, and whether
        it wants a checkpoint after `step` steps."""
        out_of_time = self.deadline is not None and self.deadline.near(
            self.longest_s, self.checkpoints.longest_s
        )
        save = step is not None and self.checkpoints.due(step)
        return {
            "stop.signal": float(bool(self.signals.received)),
            "stop.time": float(out_of_time),
            "save": float(save),
        }

    def update(self, sums: Sums) -> None:
        """Reads the flags summed over all ranks."""
        now_s = time.monotonic()
        if self.updated_s is not None:
            self.longest_s = max(self.longest_s, now_s - self.updated_s)
        self.updated_s = now_s
        if sums["stop.signal"]:
            self.stop_request = self.signals.received or "a signal on another rank"
        elif sums["stop.time"]:
            self.stop_request = (
                self.deadline.reason if self.deadline else "the time limit that rank 0 knows of"
            )

    def agree_to_stop(self) -> bool:
        """Whether any rank asks to stop, from a separate allreduce: for long work between two sync
        points. Every rank calls it."""
        flags = self.flags()
        total = self.communicator.allreduce(
            np.array([flags[name] for name in _FLAGS]), "guard.flags"
        )
        self.update(dict(zip(_FLAGS, total.tolist(), strict=True)))
        return bool(self.stop_request)

    def after_sync(self, sums: Sums) -> None:
        """Called after the sums of a sync point; the first one ends the job's startup."""
        self.update(sums)
        self.heartbeat.limit = "stall_s"

    def handle_nonfinite(self, now: TrainState, bad_steps: int) -> TrainState:
        """Applies guard.nonfinite to `bad_steps` steps; returns `now` with its count incremented by
        bad_steps (skip) or by 1 (rollback).

        stop and a count above guard.nonfinite_limit raise Diverged, the same on every rank;
        rollback loads the newest checkpoint.
        """
        policy = self.guard.nonfinite
        limit = self.guard.nonfinite_limit
        what = (
            f"{bad_steps} of the steps up to {now.progress.step} had a loss or gradient that is "
            "not finite"
        )
        if policy == "stop":
            raise Diverged(
                what, "guard.nonfinite=stop", f"{self.fix}; the newest checkpoint is from before"
            )
        count = now.nonfinite + (bad_steps if policy == "skip" else 1)
        if count > limit:
            what += f"; {count} times in all, {limit} are allowed (guard.nonfinite_limit)"
            raise Diverged(
                what,
                f"guard.nonfinite={policy}",
                "a lower optim.base_lr, or look at the data around this step",
            )
        if policy == "rollback":
            self.heartbeat.beat("rolling back", now.progress.epoch, now.progress.step)
            self.checkpoints.roll_back()
        return replace(now, nonfinite=count)

    def compare_ranks(
        self,
        learner: HasState,
        before: TrainState,
        now: TrainState,
        last: Hyper,
        *,
        before_save: bool,
    ) -> None:
        """Compares the ranks every guard.equal_steps steps, before a checkpoint and before a stop;
        the first time their outputs too.

        Every rank calls it.

        `before` and `now`: at the last sync point and at this one; `last` is of the last step.
        Raises Diverged if a rank differs.
        """
        every = self.guard.equal_steps
        if not every or self.communicator.size == 1:
            return
        if self.probe is not None:
            self.probe.compare(
                self.communicator,
                cast("Learner", learner),
                self.hosts,
                f"after step {now.progress.step}",
            )
            self.probe = None
        if (
            before_save
            or self.stop_request
            or now.progress.step // every > before.progress.step // every
        ):
            check_equal(self.communicator, learner, last, self.hosts)


# times the longest interval between two sync points, so that the next one is in time
WINDOWS_LEFT = 1.5
SAVES_LEFT = 2.0  # times the longest checkpoint: file systems are busy when many jobs end
MAX_TIME_MARGIN_S = 2.0
SLURM_MARGIN_S = 10.0  # SLURM kills the job, and its clock may differ from this host's
SQUEUE_S = 5.0  # timeout of squeue


class RemainingTime(NamedTuple):
    reason: str
    left_s: float  # now
    margin_s: float


class Deadline:
    """The earlier of max_time after started_s and SLURM's end of the job. Only on rank 0, because
    it runs squeue.

    started_s is a time of `clock`, which is monotonic; now_s is the time since the epoch
    (time.time()). SLURM's time of day is converted to the monotonic clock here, once: setting the
    host's clock later changes nothing.
    """

    def __init__(
        self,
        max_time: str | None,
        environ: Mapping[str, str],
        started_s: float,
        now_s: float,
        clock: Callable[[], float],
    ) -> None:
        limits: list[RemainingTime] = []
        if max_time is not None:
            left_s = parse_duration(max_time, "guard.max_time") - (clock() - started_s)
            limits.append(RemainingTime(f"guard.max_time={max_time}", left_s, MAX_TIME_MARGIN_S))
        end_s = slurm_end(environ, now_s)
        if end_s is not None:
            when = datetime.fromtimestamp(end_s).strftime("%Y-%m-%d %H:%M:%S")
            reason = f"SLURM ends job {environ.get('SLURM_JOB_ID', '?')} at {when}"
            limits.append(RemainingTime(reason, end_s - now_s, SLURM_MARGIN_S))
        first = min(limits, key=lambda limit: limit.left_s - limit.margin_s, default=None)
        self.reason = first.reason if first else ""
        self._clock = clock
        self._margin_s = first.margin_s if first else 0.0
        self._end_s = clock() + first.left_s - first.margin_s if first else None

    def near(self, longest_s: float, save_s: float) -> bool:
        """Whether the job should stop now; longest_s, save_s: the longest time so far between two
        sync points, and of a checkpoint."""
        if self._end_s is None:
            return False
        return self._end_s - self._clock() < WINDOWS_LEFT * longest_s + SAVES_LEFT * save_s

    def left_s(self) -> float:
        """Returns seconds until the deadline; infinite without one."""
        return (
            math.inf
            if self._end_s is None
            else max(0.0, self._end_s + self._margin_s - self._clock())
        )


def slurm_end(environ: Mapping[str, str], now_s: float) -> float | None:
    """Returns when SLURM ends the job, in seconds since the epoch; None without SLURM, without a
    limit, or if SLURM does not answer.

    An end in the past belongs to another job, from whose shell this process was started.
    """
    end_time = environ.get("SLURM_JOB_END_TIME", "")
    end_s = float(end_time) if re.fullmatch(r"[0-9]{1,10}", end_time) else _squeue_end(environ)
    return end_s if end_s is not None and end_s > now_s else None


def _squeue_end(environ: Mapping[str, str]) -> float | None:
    """Parses squeue's answer: "2026-11-21T10:00:00" in local time, or a word if there is no end."""
    job = environ.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[0-9]{1,12}", job):
        return None
    command = ["squeue", "-h", "-j", job, "-o", "%e"]
    try:
        answer = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SQUEUE_S,
            check=False,
        )
        return (
            None
            if answer.returncode
            else datetime.strptime(answer.stdout.strip(), "%Y-%m-%dT%H:%M:%S").timestamp()
        )
    except (
        OSError,
        ValueError,
        subprocess.TimeoutExpired,
    ):  # no squeue here, "N/A", a controller that is down: no limit is known
        return None
