"""The loss of a rank: it ends a RunningJob, while guard.lost selects an ElasticJob, which survives
it; and the event "lost"."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from hvdtrain.comm.communicator import Communicator, Elastic, elastic
from hvdtrain.comm.engines import may_use_gpu
from hvdtrain.comm.mesh import ranks_summary
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.events.log import Log
from hvdtrain.training.job import Job
from hvdtrain.training.progress.train_state import TrainState


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


def ready_for_losses(config: Config, communicator: Communicator) -> Elastic | None:
    """Returns the communicator, if this job survives the loss of a rank. Every rank calls it.

    Raises UserError on all ranks if guard.lost=shrink is not possible. With restart, a warning then
    reports that the job will end without a last checkpoint. The same holds if weights are sharded,
    or if each host has the whole state.
    """
    if not config.keeps_copies or communicator.size == 1:
        return None
    try:
        ranks = elastic(communicator, config.where("guard.lost"))
        ranks.be_ready_to_shrink(may_use_gpu(config))
    except UserError as error:
        if config.guard.lost == "shrink":
            raise
        if communicator.rank == 0:
            what = (
                f"guard.lost=restart writes no last checkpoint when a rank is lost: {error.what} "
                f"({error.fix})"
            )
            # the same place for both callers, so that it is shown once
            warnings.warn(what, stacklevel=1)
        return None
    return ranks


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
