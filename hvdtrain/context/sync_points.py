"""The state of a custom loop, and what its ranks agree on at a sync point, as in the trainer's
loop: buffers, sums, stops, checkpoints, events."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from hvdtrain.comm.communicator import Communicator, Elastic
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.schema import Config
from hvdtrain.context.logged import Logged
from hvdtrain.context.loop_events import epoch_fields, step_fields
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.events.log import Log
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.monitor import HealthMonitor
from hvdtrain.training.job import clock_from
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.sync_point import act, make_equal


class SyncPoints:
    """The Loop of a script, as Job is the trainer's; one on each rank, from prepare() on."""

    def __init__(
        self,
        config: Config,
        communicator: Communicator,
        learner: Any,
        health: HealthMonitor,
        heartbeat: Heartbeat,
        log: Log,
        now: TrainState,
        ranks: Elastic | None = None,
    ) -> None:
        """ranks: only if the survivors of a loss continue."""
        self._ranks = ranks
        self.config = config
        self.communicator = communicator
        self.learner = learner
        self.health = health
        self.checkpoints = health.checkpoints
        self.heartbeat = heartbeat
        self.log = log
        self.logged = Logged()
        self._logged_in_epoch = Logged()
        self.save_due = False  # set at a sync point, until the next checkpoint
        self.go_on_from(now)

    def go_on_from(self, now: TrainState) -> None:
        """Sets the loop's state, at its beginning or from a checkpoint."""
        self.now = self._before = now  # `_before`: at the last sync point
        self._clock = clock_from(now.seconds)
        # samples of this rank since then; and when that was
        self._count = 0
        self._began_s = time.perf_counter()
        self._epoch_count = 0
        self._epoch_began_s = time.perf_counter()
        self._told_epoch = now.progress.epoch  # the last epoch with an event

    def add(self, values: dict[str, Any], weight: float) -> None:
        """Adds values that the script logs. Raises UserError for a value that is not a number."""
        self.logged.add(values, weight)
        self._logged_in_epoch.add(values, weight)

    def stepped(self, count: int, batch: int) -> None:
        """Records a finished step: `count` samples on this rank, `batch` over all ranks."""
        self._count += count
        self._epoch_count += count
        p = self.now.progress.advance(batch)
        self.now = dataclasses.replace(self.now, progress=p, lr=self.learner.lr, batch=batch)
        self.heartbeat.beat("step", p.epoch, p.step)

    def sync(self, *, force: bool = False) -> None:
        """Runs the sync point after the last step, once: at every log.every_steps, at the end of
        the samples, and if `force`.

        It is then a collective. Raises Diverged on every rank for numbers that are not finite
        (guard.nonfinite), and if ranks differ.
        """
        p = self.now.progress
        every = self.config.log.every_steps
        if p.step == self._before.progress.step or not (force or p.done or p.step % every == 0):
            return
        make_equal(self, p)
        seconds = time.perf_counter() - self._began_s
        own: Sums = {
            "loss": 0.0,
            "nonfinite": self.learner.read_nonfinite(),
            "count": float(self._count),
        }
        own |= self.logged.fingerprint() | self.health.flags(p.step)
        # the host waits for the device here
        sums = allreduce_sums(self.communicator, own, "context.sums")
        means = self.logged.read(self.communicator, sums)
        self.confirm()
        now = dataclasses.replace(self.now, seconds=self._clock())
        last = Hyper(lr=now.lr, momentum=0.0, weight_decay=0.0, batch=now.batch, step=p.step)
        self.save_due = self.save_due or bool(sums["save"])
        now = act(self, self._before, now, last, sums, before_save=self.save_due)
        self.log.emit("step", p.step, **step_fields(now, means, sums["count"], seconds))
        self.now = self._before = now
        self._count = 0
        self._began_s = time.perf_counter()

    def confirm(self) -> None:
        """Called before results of all ranks are written. Fails if a rank died while they were
        computed. A collective."""
        if self._ranks is not None:
            self._ranks.confirm()

    def end_epoch(self) -> None:
        """Emits the event of a completed epoch, once: when the script asks for the next batch or
        ends its loop. It is then a collective."""
        p = self.now.progress
        if p.epoch == self._told_epoch:
            return
        self._told_epoch = p.epoch
        own: Sums = {"count": float(self._epoch_count)}
        sums = allreduce_sums(
            self.communicator, own | self._logged_in_epoch.fingerprint(), "context.epoch"
        )
        means = self._logged_in_epoch.read(self.communicator, sums)
        now = dataclasses.replace(self.now, seconds=self._clock())
        self.log.emit(
            "epoch",
            p.step,
            **epoch_fields(now, means, sums["count"], time.perf_counter() - self._epoch_began_s),
        )
        self._epoch_count = 0
        self._epoch_began_s = time.perf_counter()
