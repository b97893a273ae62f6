"""Sync points and the end of a loop, for the trainer and for custom loops: what ranks synchronize,
decide and close together."""

from __future__ import annotations

from typing import Protocol

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.errors import MEMORY, Diverged, UserError, exit_code_of
from hvdtrain.events.background_sink import CLOSE_S
from hvdtrain.events.log import Log
from hvdtrain.events.terminal import warn
from hvdtrain.frameworks.learner import HasState
from hvdtrain.training.checkpoint.checkpoints import Checkpoints
from hvdtrain.training.checkpoint.room import NO_MEMORY
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.monitor import HealthMonitor, nonfinite_steps
from hvdtrain.training.input import Prefetcher
from hvdtrain.training.progress.event_fields import nonfinite_fields
from hvdtrain.training.progress.train_state import TrainState


class Synchronizes(HasState, Protocol):
    """The part of a learner that a sync point uses."""

    def sync_buffers(self, communicator: Communicator) -> None:
        """Makes buffers equal, see Learner.sync_buffers()."""


class Loop(Protocol):
    """The part of a loop on this rank that a sync point uses. The trainer's loop is a Job; custom
    loops are in hvdtrain/context/."""

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
    """Makes running statistics, and weights after local steps, equal on all ranks. Sums and
    health.flags() are then summed over ranks."""
    loop.heartbeat.beat("synchronizing", p.epoch, p.step)
    loop.learner.sync_buffers(loop.communicator)


def act(
    loop: Loop, before: TrainState, now: TrainState, last: Hyper, sums: Sums, *, before_save: bool
) -> TrainState:
    """Acts on flags and on numbers that are not finite, compares the ranks, and returns the state.
    sums: of all ranks.

    before: the state at the last sync point; last: of the last step. Raises Diverged as
    HealthMonitor does.
    """
    loop.health.after_sync(sums)
    if bad_steps := nonfinite_steps(sums):
        now = loop.health.handle_nonfinite(now, bad_steps)
        loop.log.emit("nonfinite", now.progress.step, **nonfinite_fields(loop.config, now))
        if loop.config.guard.nonfinite == "rollback":
            return now  # all ranks now have a checkpoint's weights
    if before_save:
        loop.checkpoints.expect()
    loop.health.compare_ranks(loop.learner, before, now, last, before_save=before_save)
    return now


# how long a loop that failed, or has to stop, waits at the end for its sinks to write
HASTY_S = 3.0


def write_last_checkpoint(loop: Loop, now: TrainState, reason: str, *, is_over: bool) -> str:
    """Writes the last checkpoint and waits for it. If that fails and the loop can be resumed
    without it, returns the reason, else "". Every rank calls it.

    Raises UserError or Diverged if it cannot be written and the loop is complete or has no older
    checkpoint.
    """
    loop.heartbeat.limit = "start_s"
    loop.heartbeat.beat("writing the last checkpoint", now.progress.epoch, now.progress.step)
    _warn_of_too_little_time(loop, now)
    last = loop.checkpoints.finish(now)
    run = f"{loop.checkpoints.run}"
    if not last.failure or (last.any_left and not is_over):
        return last.failure
    what = (
        f"the job {'is done' if is_over else 'stopped'} ({reason}), but its last checkpoint was "
        f"not written: {last.failure}"
    )
    if last.failure.endswith("is not finite"):
        raise Diverged(what, run, "a lower optim.base_lr")
    error = UserError(what, run, "make room, and start it again")
    if last.failure.startswith(NO_MEMORY):
        error.fix = (
            "more memory, or shard.stage=1, 2 or 3, so that each rank has less; start it again"
        )
        error.code = MEMORY
    raise error


def _warn_of_too_little_time(loop: Loop, now: TrainState) -> None:
    """Warns on rank 0 if the job must end before its last checkpoint can be on disk, judged by the
    slowest one so far."""
    deadline = loop.health.deadline
    saver = loop.checkpoints.saver
    if deadline is None or saver is None or saver.newest == (now.progress.step, now.evaluated):
        return
    left_s = deadline.left_s()
    if left_s < saver.measured_s:
        newest = (
            f"the newest is of step {saver.newest[0]}"
            if saver.newest[0] >= 0
            else "there is none of this run yet"
        )
        warn(
            f"{deadline.reason}: {left_s:.0f} s are left for the last checkpoint, and one of this "
            f"run has taken {saver.measured_s:.0f} s; "
            f"where it is cut off, {newest}"
        )


def fail(loop: Loop, step: int, error: BaseException) -> None:
    """Emits the event "failed". For Diverged, which every rank raises, all ranks wait: no rank ends
    the job while rank 0 writes a checkpoint."""
    try:
        if isinstance(error, Diverged):
            loop.heartbeat.limit = "start_s"
            loop.checkpoints.close_on_all_ranks()
    finally:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        loop.log.emit("failed", step, reason=reason, exit_code=exit_code_of(error))


def close_all(loop: Loop, prefetcher: Prefetcher | None, *, failed: bool) -> None:
    """Closes readers and writers: waits for a pending checkpoint and for events, but not long if
    the loop failed or has to stop."""
    if prefetcher is not None:
        prefetcher.close(wait=not failed)
    loop.checkpoints.close()
    loop.log.close(HASTY_S if failed or loop.health.stop_request else CLOSE_S)
