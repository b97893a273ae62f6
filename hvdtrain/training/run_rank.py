"""Runs one rank from its command line: reads the configuration, connects the ranks, and ends them
all on an error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.driver_files import HERE
from hvdtrain.comm.launcher_variables import Placement, placement
from hvdtrain.comm.mesh import place_of
from hvdtrain.comm.on_all_ranks import on_rank_0
from hvdtrain.config import plugins
from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import Assignment, assignments, read_resumed
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import Given
from hvdtrain.data.configured.class_names import with_class_names
from hvdtrain.data.configured.columns import with_columns
from hvdtrain.errors import UserError
from hvdtrain.events.rank_log import RankWarnings, rank_warnings
from hvdtrain.features.every_feature import configure
from hvdtrain.recipe.batch import resolve_batch_size
from hvdtrain.training.before_data import check_before_data
from hvdtrain.training.build import connect
from hvdtrain.training.conflicts import refuse_before_connecting, refuse_conflicts
from hvdtrain.training.datasets import open_datasets, with_blocks
from hvdtrain.training.failure import RankFailed, end_every_rank, is_only_process, report_crashes
from hvdtrain.training.health.heartbeat import Heartbeat, noted, place_and_pass
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.health.watchdog import Watchdog
from hvdtrain.training.job_memory import advised, forecast_of_job, resolve_micro
from hvdtrain.training.lost import survival_of
from hvdtrain.training.memory import room_of_rank
from hvdtrain.training.run_lock import RunLock
from hvdtrain.training.train_job import JobResult, train_job

T = TypeVar("T")
_NOTHING: Mapping[str, Given] = {}
# returns the assignments from the run that resume= names
ReadFormerRun = Callable[[Sequence[Assignment]], list[Assignment]]


class ConnectedRank(NamedTuple):
    """A connected rank with its configuration, before it reads data."""

    config: Config
    communicator: Communicator
    engine_reason: str
    signals: Signals
    heartbeat: Heartbeat
    warnings: RankWarnings
    lock: RunLock  # not acquired
    watchdog: Watchdog
    notes: Sequence[str] = ()  # lines for the header


def run_rank(
    config_file: str | None,
    arguments: Sequence[str],
    *,
    from_script: bool = False,
    given: Mapping[str, Given] = _NOTHING,
    imported: Callable[[], None] = lambda: None,
) -> JobResult:
    """Trains with a YAML file and key=value arguments. Raises as connected_rank().

    given: objects of the script, by section. imported: called when the libraries are imported.
    """
    with connected_rank(config_file, arguments, from_script=from_script, given=given) as rank:
        return _train(rank, imported)


def _train(rank: ConnectedRank, imported: Callable[[], None]) -> JobResult:
    survival_of(rank.config, rank.communicator)
    check_before_data(rank.config, rank.communicator, rank.heartbeat)
    rank.heartbeat.beat("reading the data", 0, 0)
    datasets = open_datasets(rank.config, rank.communicator)
    config = with_columns(rank.config, datasets.train)
    config = with_blocks(with_class_names(config, datasets.train), datasets.train)
    config = resolve_micro(config, datasets, rank.communicator)
    with advised(
        lambda: forecast_of_job(config, datasets, rank.communicator),
        room_of_rank(config, rank.communicator),
    ):
        imported()  # the framework too, by room_of_rank()
        return train_job(
            config,
            datasets,
            rank.communicator,
            rank.engine_reason,
            rank.signals,
            rank.heartbeat,
            rank.lock,
            rank.warnings,
            rank.watchdog,
            rank.notes,
        )


def on_connected_ranks(
    work: Callable[[ConnectedRank], T],
    config_file: str | None,
    arguments: Sequence[str],
    *,
    read_former_run: ReadFormerRun = read_resumed,
    from_script: bool = False,
    given: Mapping[str, Given] = _NOTHING,
    what: str = "job",
) -> T:
    """Runs the work on this rank and returns its result. Every rank calls it. Raises, and ends all
    ranks, as connected_rank()."""
    with connected_rank(
        config_file,
        arguments,
        read_former_run=read_former_run,
        from_script=from_script,
        given=given,
        what=what,
    ) as rank:
        return work(rank)


@contextlib.contextmanager
def connected_rank(
    config_file: str | None,
    arguments: Sequence[str],
    *,
    read_former_run: ReadFormerRun = read_resumed,
    from_script: bool = False,
    given: Mapping[str, Given] = _NOTHING,
    what: str = "job",
) -> Iterator[ConnectedRank]:
    """Connects this rank with the others, by the launcher's variables. Every rank enters the
    context, and all leave it together.

    what: a name for the work, for error messages. An error is reported and ends every rank;
    RankFailed is raised here. Two kinds of errors are raised unchanged: a UserError of the
    configuration before ranks connect, and with from_script any error if this process is the whole
    job.
    """
    report_crashes()
    place = placement(os.environ)
    config = _before_connecting(config_file, arguments, place, read_former_run, given)
    heartbeat = Heartbeat(owns_process=not from_script)
    with (
        Signals(place.rank) as signals,
        RunLock(heartbeat, signals, config.guard.start_s) as lock,
        Watchdog(heartbeat, signals, config.guard, place.rank, lock.release) as watchdog,
        rank_warnings(place.rank, place.size, from_script=from_script) as shown_warnings,
    ):
        communicator: Communicator | None = None
        try:
            heartbeat.beat("connecting the ranks", 0, 0)
            refuse_before_connecting(config, place)
            communicator, engine_reason = connect(config, place)
            watchdog.attach(communicator)
            if config.resume not in ("auto", "no"):
                config = _with_former_run(
                    config_file, arguments, communicator, read_former_run, given
                )
            config = resolve_batch_size(config, communicator.size)
            refuse_conflicts(config, communicator.name, communicator.size)
            watchdog.places = [
                place_of(rank, communicator.size, config.parallel)
                for rank in range(communicator.size)
            ]
            heartbeat.place = watchdog.places[communicator.rank]
            with (
                noted(heartbeat, communicator.rank),
                bound_cores(config, communicator) as cores,
            ):
                yield ConnectedRank(
                    config,
                    communicator,
                    engine_reason,
                    signals,
                    heartbeat,
                    shown_warnings,
                    lock,
                    watchdog,
                    cores,
                )
            shown_warnings.exchange(communicator)
            communicator.close()
        except BaseException as error:  # SystemExit too
            lock.release()
            if from_script and is_only_process(
                None
            ):  # but not in a job whose other ranks were lost
                raise
            raise RankFailed(
                end_every_rank(error, communicator, what, place_and_pass(heartbeat))
            ) from error


@contextlib.contextmanager
def bound_cores(config: Config, communicator: Communicator) -> Iterator[list[str]]:
    """Binds this rank's threads inside, as comm.bind asks. Gives lines for the header. Every rank
    enters it."""
    if config.comm.bind == "none":
        yield []
        return
    from hvdtrain.comm.cores.bind import bound, lines_of_seats

    with bound(config.comm.bind, communicator, lambda: gpu_address(config, communicator)) as seats:
        yield lines_of_seats(config.comm.bind, seats)


def gpu_address(config: Config, communicator: Communicator) -> str | None:
    """Returns the PCI address of this rank's GPU; None if it has none, or it is not known which
    one."""
    framework: Any = plugins.load("frameworks", config.framework, config.where("framework"))
    if hasattr(framework, "gpu_address"):
        with contextlib.suppress(UserError):  # no such device, which build() reports
            address: str | None = framework.gpu_address(config, communicator)
            return address
        return None
    if config.speed.device == "cpu" or config.framework == "numpy":
        return None
    first = communicator.local_rank * config.speed.devices  # the first of the rank's JAX devices
    return HERE.address_of(first, os.environ)


def _before_connecting(
    config_file: str | None,
    arguments: Sequence[str],
    place: Placement,
    read_former_run: ReadFormerRun,
    given: Mapping[str, Given],
) -> Config:
    """Returns the configuration that this rank knows by itself, with the keys of the run to resume.

    comm.engine=auto depends on them, and all ranks must choose the same engine, or they wait for
    each other. A rank that cannot read the run, as on a host without the file system of rank 0,
    leaves it out. Errors about the run are raised once the ranks are connected: mpirun may hang if
    one rank ends while others connect.
    """
    try:
        return _configure(
            config_file, arguments, read_former_run(assignments(config_file, arguments)), given
        )
    except UserError:
        if place.size == 1:
            raise
    return _configure(config_file, arguments, (), given)


def _with_former_run(
    config_file: str | None,
    arguments: Sequence[str],
    communicator: Communicator,
    read_former_run: ReadFormerRun,
    given: Mapping[str, Given],
) -> Config:
    """Returns the configuration with the values of the run to resume; rank 0 reads them, since
    hosts need not share a file system."""
    former = on_rank_0(communicator, lambda: read_former_run(assignments(config_file, arguments)))
    return _configure(config_file, arguments, former, given)


def _configure(
    config_file: str | None,
    arguments: Sequence[str],
    former: Sequence[Assignment],
    given: Mapping[str, Given],
) -> Config:
    """Parses the configuration, with the keys of a former run. Raises UserError, also if a plugin's
    file does not exist."""
    config = configure(config_file, arguments, former)
    if given:
        from hvdtrain.training.given import with_given

        config = with_given(config, given)
    check_names(config)
    return config
