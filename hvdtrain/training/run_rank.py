"""One rank of a job, from the arguments of the command line to the result: reads the configuration, connects the ranks, trains."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import placement
from hvdtrain.comm.rank_0 import on_rank_0
from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import assignments, configure, read_resumed
from hvdtrain.config.schema import Config
from hvdtrain.events.rank_log import tagged_warnings
from hvdtrain.recipe.batch_size import resolve_batch_size
from hvdtrain.training.build import connect
from hvdtrain.training.conflicts import refuse_before_connecting, refuse_conflicts
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.failure import RankFailed, end_every_rank, is_only_process
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.health.watchdog import Watchdog
from hvdtrain.training.train_job import JobResult, train_job


def run_rank(config_file: str | None, arguments: Sequence[str], *, from_script: bool = False) -> JobResult:
    """Trains with a YAML file and key=value arguments. The launcher's variables tell which rank this process is.

    An error ends every rank after it was reported, and RankFailed is raised here. Raised as they are: a UserError of the configuration
    alone, before ranks connect; and with from_script any error where this process is the whole job.
    """
    place = placement(os.environ)
    config = configure(config_file, arguments, None if place.rank == 0 else ())
    check_names(config)
    heartbeat = Heartbeat(owns_process=not from_script)
    with (
        Signals(place.rank) as signals,
        Watchdog(heartbeat, signals, config.guard, place.rank) as watchdog,
        tagged_warnings(place.rank, place.size),
    ):
        communicator: Communicator | None = None
        try:
            heartbeat.beat("connecting the ranks", 0, 0)
            refuse_before_connecting(config, place)
            communicator, engine_reason = connect(config, place)
            watchdog.attach(communicator)
            if config.resume not in ("auto", "no"):
                config = _with_former_run(config_file, arguments, communicator)
            config = resolve_batch_size(config, communicator.size)
            refuse_conflicts(config, communicator.name, communicator.size)
            heartbeat.beat("reading the data", 0, 0)
            datasets = open_datasets(config)
            result = train_job(config, datasets, communicator, engine_reason, signals, heartbeat)
            communicator.close()
            return result
        except BaseException as error:  # SystemExit too
            if from_script and is_only_process(communicator):
                raise
            raise RankFailed(end_every_rank(error, communicator)) from error


def _with_former_run(config_file: str | None, arguments: Sequence[str], communicator: Communicator) -> Config:
    """The configuration with what the run to resume has; rank 0 reads that, since hosts need not share a file system."""
    former = on_rank_0(communicator, lambda: read_resumed(assignments(config_file, arguments)))
    return configure(config_file, arguments, former)
