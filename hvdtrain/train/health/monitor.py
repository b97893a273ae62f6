"""What ends or turns a job before its time, decided by all ranks alike where they meet: signals, time, bad numbers, ranks that differ."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import Diverged
from hvdtrain.frameworks.learner import Learner
from hvdtrain.train.checkpoint.saver import Saver
from hvdtrain.train.health.deadline import Deadline
from hvdtrain.train.health.heartbeat import Heartbeat
from hvdtrain.train.health.replicas import check_equal
from hvdtrain.train.health.signals import Signals
from hvdtrain.train.progress.train_state import TrainState

_KEYS = ("stop.signal", "stop.time", "save")


@dataclass
class HealthMonitor:
    """One on each rank. What it has heard rides on the sums that the ranks add up anyway."""

    config: Config
    communicator: Communicator
    signals: Signals
    heartbeat: Heartbeat
    hosts: list[str]  # of each rank
    deadline: Deadline | None = None  # rank 0's clock is everybody's
    saver: Saver | None = None  # of rank 0
    longest_s: float = 0.0  # between two times that wishes were heard
    heard_s: float | None = None  # of time.monotonic(), the last time
    stop: str = ""  # why the job stops now, to go on later; the same moment on every rank

    def flags(self, step: int = -1) -> Sums:
        """What this rank asks for; for allreduce_sums(). Rank 0's saver may want to write at the meeting after `step` steps."""
        late = self.deadline is not None and self.deadline.near(self.longest_s, self.save_s)
        wanted = self.saver is not None and step >= 0 and self.saver.wants(step)
        return dict(zip(_KEYS, (float(bool(self.signals.heard)), float(late), float(wanted)), strict=True))

    @property
    def save_s(self) -> float:
        """Of the longest checkpoint, a guess before the first."""
        return self.saver.longest_s if self.saver else 0.0

    def update_flags(self, sums: Sums) -> None:
        """Takes the flags of all ranks."""
        now_s = time.monotonic()
        self.longest_s, self.heard_s = max(self.longest_s, now_s - (self.heard_s or now_s)), now_s
        if sums["stop.signal"]:
            self.stop = self.signals.heard or "a signal on another rank"
        elif sums["stop.time"]:
            self.stop = self.deadline.words if self.deadline else "the time limit that rank 0 knows of"

    def ask(self) -> bool:
        """Whether to stop, by a small collective of its own: for long work between two meetings. Every rank calls it."""
        total = self.communicator.allreduce(np.array(list(self.flags().values())), "guard.flags")
        self.update_flags(dict(zip(_KEYS, total.tolist(), strict=True)))
        return bool(self.stop)

    def after_sync(self, sums: Sums) -> None:
        """The ranks have met: the start is over once the first steps are done."""
        self.update_flags(sums)
        self.heartbeat.patient = False

    def is_finite(self, now: TrainState, sums: Sums) -> bool:
        """False where steps since the last meeting were bad and the job goes on all the same; the same on every rank."""
        bad, policy, limit = round(sums["nonfinite"]), self.config.guard.nonfinite, self.config.guard.nonfinite_limit
        if not bad and math.isfinite(sums["loss"]):
            return True
        told = f"{max(1, bad)} of the steps up to {now.progress.step} had a loss or gradient that is not finite"
        more = max(1, bad) if policy == "skip" else 1
        if policy == "stop":
            fix = "a lower optim.base_lr, a longer recipe.warmup_epochs or optim.clip_norm; or guard.nonfinite=skip or rollback"
            raise Diverged(told, "guard.nonfinite=stop", f"{fix}; the newest checkpoint is from before")
        if now.nonfinite + more > limit:
            what = f"{told}; {now.nonfinite + more} times in all, {limit} are allowed (guard.nonfinite_limit)"
            raise Diverged(what, f"guard.nonfinite={policy}", "a lower optim.base_lr, or look at the data around this step")
        return False

    def check_equal(self, learner: Learner, before: TrainState, now: TrainState, last: Hyper, written: bool) -> None:
        """Compares the ranks where guard.equal_steps has come round since the meeting before, and before a checkpoint is `written`."""
        every = self.config.guard.equal_steps
        due = written or bool(self.stop) or (every and now.progress.step // every > before.progress.step // every)
        if every and due and self.communicator.size > 1:
            check_equal(self.communicator, learner, last, self.hosts)

    def handle_nonfinite(self, now: TrainState, sums: Sums, roll_back: Callable[[], None]) -> TrainState:
        """After bad steps, which were skipped, or with the newest checkpoint loaded; either way on with the next data, and counted."""
        if self.config.guard.nonfinite == "rollback":
            self.heartbeat.beat("rolling back", now.progress.epoch, now.progress.step)
            roll_back()
        return self.counted(now, sums)

    def counted(self, now: TrainState, sums: Sums) -> TrainState:
        """The standing with bad steps, or one rollback, counted."""
        more: Any = max(1, round(sums["nonfinite"])) if self.config.guard.nonfinite == "skip" else 1
        return replace(now, nonfinite=now.nonfinite + more)
