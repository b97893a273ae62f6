"""Trains, on this rank: whatever goes wrong on any rank ends every rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import Provenance, assignments, configure, read_resumed
from hvdtrain.errors import ADVICE, DIVERGED, USER, UserError, exit_code_of

if TYPE_CHECKING:
    from hvdtrain.comm.communicator import Communicator
    from hvdtrain.comm.placement import Placement
    from hvdtrain.config.schema import Config
    from hvdtrain.train.health.heartbeat import Heartbeat
    from hvdtrain.train.health.signals import Signals
    from hvdtrain.train.health.watchdog import Watchdog
    from hvdtrain.train.progress.train_state import TrainState

Failed = Callable[[BaseException, "Communicator | None"], "Outcome"]


class Outcome(NamedTuple):
    """What became of a job, on every rank."""

    code: int  # exit code
    run: Path | None = None  # the run folder, as rank 0 knows it
    why: str = ""  # it is over, or stopped
    train_state: TrainState | None = None


LAST_WORDS_S = 0.2  # mpirun puts its own text between the pieces of ours that it has not passed on yet
END_S = 10  # an abort that hangs ends by SIGALRM
ECHO_S = 1.5  # what one rank stumbles over most often stops all: the others wait this long for rank 0 to tell it and end the job


def run(path: str | None, words: list[str]) -> int:
    """Trains, and ends every rank where one fails; the exit code."""
    return train(path, words, end_all).code


def train(path: str | None, words: list[str], failed: Failed, *, from_script: bool = False) -> Outcome:
    """What became of the job; or what `failed` makes of an error, a UserError of the first words excepted, which is raised."""
    from hvdtrain.comm.placement import placement
    from hvdtrain.events.rank_log import tagged_warnings
    from hvdtrain.train.health.heartbeat import Heartbeat
    from hvdtrain.train.health.signals import Signals
    from hvdtrain.train.health.watchdog import Watchdog

    place = placement(os.environ)
    given = configure(path, words, None if place.rank == 0 else ())
    check_names(given[0])
    heartbeat = Heartbeat(of_process=not from_script)
    with (
        Signals(place.rank) as signals,
        Watchdog(heartbeat, signals, given[0].guard, place.rank) as watch,
        tagged_warnings(place.rank, place.size),
    ):
        return _train((path, words), given, place, (signals, heartbeat, watch), failed)


def _train(
    typed: tuple[str | None, list[str]],
    given: tuple[Config, Provenance],
    place: Placement,
    eyes: tuple[Signals, Heartbeat, Watchdog],
    failed: Failed,
) -> Outcome:
    from hvdtrain.recipe.batch_size import resolve_batch_size
    from hvdtrain.train.build import connect
    from hvdtrain.train.conflicts import refuse_before_connecting, refuse_conflicts
    from hvdtrain.train.job import prepare, train_job

    communicator: Communicator | None = None
    signals, heartbeat, watch = eyes
    try:
        heartbeat.beat("connecting the ranks", 0, 0)
        refuse_before_connecting(given[0], place)
        communicator, why = connect(*given, place)
        watch.meet(communicator)
        config = resolve_batch_size(_of_all(typed, given, communicator)[0], communicator.size)
        provenance = config.provenance
        refuse_conflicts(config, communicator.name, communicator.size)
        heartbeat.beat("reading the data", 0, 0)
        parts = prepare(config, provenance)
        outcome = Outcome(*train_job(config, provenance, parts, communicator, why, (signals, heartbeat)))
        communicator.close()
        return outcome
    except BaseException as error:  # SystemExit too: a rank that leaves alone would let the others wait for ever
        return failed(error, communicator)


def end_all(error: BaseException, communicator: Communicator | None) -> Outcome:
    """The error is told, and the job ends: in every process that belongs to it."""
    if isinstance(error, UserError):
        return Outcome(fail(f"hvdtrain: {error}", error.code, communicator))
    if isinstance(error, BrokenPipeError):
        hush()
    code = exit_code_of(error)
    advice = f"\nhvdtrain: {ADVICE[code]}" if code in ADVICE else ""
    return Outcome(fail(traceback.format_exc().rstrip() + advice, code, communicator))


def raise_alone(error: BaseException, communicator: Communicator | None) -> Outcome:
    """For a script: raised where this process is the whole job."""
    if _is_alone(communicator):
        raise error
    sys.exit(end_all(error, communicator).code)


def _is_alone(communicator: Communicator | None) -> bool:
    if communicator is not None:
        return communicator.size == 1
    from hvdtrain.comm.placement import placement

    return placement(os.environ).size == 1


def _of_all(typed: tuple[str | None, list[str]], given: tuple[Config, Provenance], communicator: Communicator) -> tuple[Config, Provenance]:
    """The configuration of the job. That of a run to go on from is known to rank 0 alone: the hosts need not share a file system."""
    if given[0].resume in ("auto", "no"):
        return given
    from hvdtrain.train.same_state import on_rank_0

    return configure(*typed, on_rank_0(communicator, lambda: read_resumed(assignments(*typed))))


def fail(text: str, code: int, communicator: Communicator | None) -> int:
    """Says what went wrong and ends the job: all ranks at once where an engine connects them, else by this rank's exit code."""
    rank, told_alike = _rank(communicator), code in (USER, DIVERGED)
    if rank:
        time.sleep(ECHO_S)
    who = f"rank {rank} on {socket.gethostname()}"
    with contextlib.suppress(OSError):  # nobody reads it, as after the end of mpirun: the job ends all the same
        print(text if told_alike and not rank else f"{text}\n{who}: the error above ends the job", file=sys.stderr, flush=True)
    if communicator is not None and communicator.size > 1:
        _last_words()
        communicator.abort(code)
    if communicator is None and "mpi4py.MPI" in sys.modules:
        from hvdtrain.comm.mpi import abort, is_together

        if is_together():
            _last_words()
            abort(code)
    return code


def hush() -> None:
    """Nobody reads the standard output any more: what is left of it must not change the exit code, to Python's 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _last_words() -> None:
    time.sleep(LAST_WORDS_S)
    signal.alarm(END_S)


def _rank(communicator: Communicator | None) -> int:
    if communicator is not None:
        return communicator.rank
    from hvdtrain.comm.placement import placement

    try:
        return placement(os.environ).rank
    except UserError:
        return 0
