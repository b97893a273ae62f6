"""A sync point, of the trainer's loop and of a script's own: what the ranks make equal there, and what they do alike."""

from __future__ import annotations

from typing import Protocol

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.events.log import Log
from hvdtrain.frameworks.learner import HasState
from hvdtrain.training.checkpoint.checkpoints import Checkpoints
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.monitor import HealthMonitor, nonfinite_steps
from hvdtrain.training.progress.event_fields import nonfinite_fields
from hvdtrain.training.progress.train_state import TrainState


class Synchronizes(HasState, Protocol):
    """What a sync point needs of a learner."""

    def sync_buffers(self, communicator: Communicator) -> None:
        """Makes buffers equal: sync_buffers() of Learner."""


class Loop(Protocol):
    """What a sync point needs of a loop on this rank: the trainer's is a Job, a script's own is hvdtrain/context/."""

    @property
    def config(self) -> Config: ...
    @property
    def communicator(self) -> Communicator: ...
    @property
    def learner(self) -> Synchronizes: ...
    @property
    def heartbeat(self) -> Heartbeat: ...
    @property
    def checkpoints(self) -> Checkpoints: ...
    @property
    def health(self) -> HealthMonitor: ...
    @property
    def log(self) -> Log: ...


def make_equal(loop: Loop, p: Progress) -> None:
    """Running statistics, and weights after local steps, on all ranks. The sums and health.flags() are added up over ranks next."""
    loop.heartbeat.beat("synchronizing", p.epoch, p.step)
    loop.learner.sync_buffers(loop.communicator)


def act(loop: Loop, before: TrainState, now: TrainState, last: Hyper, sums: Sums, *, before_save: bool) -> TrainState:
    """Acts on flags and on numbers that are not finite, and compares the ranks; the state after that. `sums` are of all ranks.

    before: the state at the last sync point; last: of the last step. Raises Diverged as HealthMonitor does.
    """
    loop.health.after_sync(sums)
    if bad_steps := nonfinite_steps(sums):
        now = loop.health.handle_nonfinite(now, bad_steps)
        loop.log.emit("nonfinite", now.progress.step, **nonfinite_fields(loop.config, now))
        if loop.config.guard.nonfinite == "rollback":
            return now  # the weights are those of a checkpoint, on all ranks
    if before_save:
        loop.checkpoints.expect()
    loop.health.compare_ranks(loop.learner, before, now, last, before_save=before_save)
    return now
