"""The loss of a rank: it ends a RunningJob, while guard.lost selects one of an extra, which
survives it; and the event "lost"."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from hvdtrain.comm.communicator import Communicator, Elastic
from hvdtrain.comm.mesh import ranks_summary
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementation
from hvdtrain.events.log import Log, Sink
from hvdtrain.training.checkpoint.saver import Saver
from hvdtrain.training.health.watchdog import Watchdog
from hvdtrain.training.job import Job
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.run_lock import RunLock


class RunningJob:
    """A job that ends with the first error. Subclasses override this."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def outlives(self, error: Exception) -> bool:
        """Whether the error is the loss of a rank that the others survive, by calling go_on()."""
        return False

    def go_on(self) -> TrainState:
        """Restores the newest sync point in self.job and returns its state. Every surviving rank
        calls it."""
        raise AssertionError("a job that survives no error cannot continue after one")


class Survival(Protocol):
    """How the remaining ranks of a job continue after a loss."""

    ranks: Elastic  # the communicator of the job

    def running_job(
        self,
        job: Job,
        now: TrainState,
        run: Path,
        lock: RunLock,
        watchdog: Watchdog | None,
        open_sinks: Callable[[], list[Sink]],
        make_saver: Callable[[TrainState], Saver],
    ) -> RunningJob:
        """Returns the job that survives losses. open_sinks, make_saver: for a rank that takes over
        as rank 0. Every rank calls it, in the state `now`."""


def survival_of(
    config: Config, communicator: Communicator, *, in_loop: bool = False
) -> Survival | None:
    """Returns how this job, or custom loop, survives the loss of a rank; None if it does not. Every
    rank calls it. Raises UserError on all ranks if guard.lost=shrink is not possible."""
    module = implementation("guard.lost")
    if module is None or config.guard.lost == "stop":
        return None
    found: Survival | None = importlib.import_module(module).survival_of(
        config, communicator, in_loop=in_loop
    )
    return found


class RankFailure(NamedTuple):
    """A loss of ranks, and its cost."""

    ranks: list[int]  # the launcher's rank numbers
    hosts: list[str]
    step: int  # the step that a surviving rank had reached
    detect_s: (
        float  # on this rank, from the error of a collective until every surviving rank knew of it
    )
    go_on_s: float  # from the same error until training continues
    restored_from: str  # memory, checkpoint, or GoOn.source
    given_again: list[int] | None  # tickets of asynchronous updates; None: all ranks roll back

    @property
    def goes_on(self) -> bool:
        """Whether the ranks continue without going back to a sync point."""
        return self.given_again is not None

    def who(self) -> str:
        """Returns the ranks and their hosts, for people."""
        return f"{ranks_summary(self.ranks)} on {', '.join(dict.fromkeys(self.hosts))}"


def tell_loss(
    log: Log, loss: RankFailure, now: TrainState, step: int, left: int, then: str
) -> None:
    """Emits the event "lost". step: the step from which training continues; left: the number of
    surviving ranks; then: what happens next, for the line."""
    line = f"lost    {loss.who()}, after step {loss.step}: {then}, after {loss.go_on_s:.3g} s"
    log.emit(
        "lost",
        step,
        ranks=loss.ranks,
        hosts=loss.hosts,
        left=left,
        detect_s=round(loss.detect_s, 6),
        go_on_s=round(loss.go_on_s, 6),
        steps_lost=loss.step - step,
        evaluated=now.evaluated,
        restored_from=loss.restored_from,
        **({"given_again": loss.given_again} if loss.goes_on else {}),
        lines=[line],
    )
