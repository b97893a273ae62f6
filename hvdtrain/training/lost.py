"""What the loss of a rank is to the others: the end of a RunningJob, unless guard.lost asks for an
ElasticJob, and an event."""

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
    """A job that ends with the first error. Others say what they do differently."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def outlives(self, error: Exception) -> bool:
        """Whether it is the loss of a rank without which the others go on, by go_on()."""
        return False

    def go_on(self) -> TrainState:
        """The state of the newest sync point, in which self.job goes on. Every living rank calls
        it."""
        raise AssertionError("a job that outlives no error goes on after none")


class RankFailure(NamedTuple):
    """What a loss costs."""

    ranks: list[int]  # as the launcher numbered them
    hosts: list[str]
    step: int  # that a living rank had come to
    detect_s: (
        float  # on this rank, from the error of a collective until every living rank knew of it
    )
    go_on_s: float  # from the same error until training goes on
    restored_from: str  # memory, checkpoint, or GoOn.source
    given_again: list[int] | None  # tickets of asynchronous updates; None: all go back

    @property
    def goes_on(self) -> bool:
        """Whether the ranks do not go back to a sync point."""
        return self.given_again is not None

    def who(self) -> str:
        """The ranks and their hosts, for people."""
        return f"{ranks_summary(self.ranks)} on {', '.join(dict.fromkeys(self.hosts))}"


def ready_for_losses(config: Config, communicator: Communicator) -> Elastic | None:
    """The communicator, where this job outlives the loss of a rank. Every rank calls it.

    Raises UserError on all ranks where guard.lost=shrink asks for that and it cannot be; with
    restart the job then ends without a last checkpoint, which a warning says, and so it does where
    ranks have parts of the weights, or each host has all of the state.
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
            warnings.warn(what, stacklevel=1)  # the same place for both callers: it is shown once
        return None
    return ranks


def tell_loss(
    log: Log, loss: RankFailure, now: TrainState, step: int, left: int, then: str
) -> None:
    """The event "lost". step: from which training goes on; left: ranks; then: what becomes of the
    job, for people."""
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
