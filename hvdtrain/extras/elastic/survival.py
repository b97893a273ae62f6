"""The entry of this extra: whether a job or a loop survives the loss of a rank, and how a loop
continues without it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.comm.communicator import Communicator, Elastic, elastic
from hvdtrain.comm.engines import may_use_gpu
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.events.log import Sink
from hvdtrain.training.checkpoint.saver import Saver
from hvdtrain.training.health.watchdog import Watchdog
from hvdtrain.training.job import Job
from hvdtrain.training.lost import RankFailure, RunningJob
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.run_lock import RunLock

if TYPE_CHECKING:  # only custom loops
    from hvdtrain.context.context import Context
    from hvdtrain.context.open_run import Former
    from hvdtrain.training.run_rank import ConnectedRank


def survival_of(
    config: Config, communicator: Communicator, *, in_loop: bool
) -> SurvivingRanks | None:
    """Implements hvdtrain.training.lost.survival_of()."""
    if in_loop and config.run is None:
        what = "guard.lost=shrink resumes from checkpoints, but without run= there are none"
        raise UserError(what, config.where("guard.lost"), "run=DIR")
    ranks = ready_for_losses(config, communicator)
    return None if ranks is None else SurvivingRanks(ranks)


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


class SurvivingRanks:
    """Implements LoopSurvival of hvdtrain.context.run_loop."""

    def __init__(self, ranks: Elastic) -> None:
        """ranks: from ready_for_losses()."""
        self.ranks = ranks

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
        from hvdtrain.extras.elastic.elastic_job import ElasticJob, Successor

        successor = Successor(job.config, run, lock, open_sinks, make_saver)
        return ElasticJob(job, self.ranks, successor, watchdog, now)

    def without_lost(
        self,
        rank: ConnectedRank,
        hosts: list[str],
        context: Context | None,
        former: Former | None,
    ) -> Former:
        ranks = self.ranks
        began_s = time.perf_counter()
        heartbeat = rank.heartbeat
        lost = list[int]()
        step, untold = (
            (context.step, context.untold_loss)
            if context is not None
            else (0, former.loss if former else None)
        )
        if context is not None:
            context.give_up()
        while True:
            try:
                heartbeat.beat("continuing without lost ranks", heartbeat.epoch, step)
                lost += ranks.shrink()
                detect_s = time.perf_counter() - began_s
                rank.watchdog.attach(ranks)
                steps = ranks.allgather_object(step)
                ranks.confirm()
                break
            except Exception as error:
                if not ranks.is_loss(error):
                    raise
        rank.warnings.renumber(ranks.rank, ranks.size)
        if untold is not None:  # lost before the survivors had restarted
            lost, steps = [*untold.ranks, *lost], [*steps, untold.step]
        # go_on_s is known later
        loss = RankFailure(
            lost, [hosts[each] for each in lost], max(steps), detect_s, detect_s, "checkpoint", None
        )
        if context is not None:
            return context.former(loss, began_s)
        assert former is not None
        return former._replace(loss=loss)
