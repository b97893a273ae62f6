"""RunningJob: the job of this rank while it trains. An error of any rank ends it, unless guard.lost
asks for an ElasticJob."""

from __future__ import annotations

import warnings

from hvdtrain.comm.communicator import Communicator, Elastic, elastic
from hvdtrain.comm.engines import may_use_gpu
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
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
