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
from hvdtrain.config.read import Origins, assignments, configure, read_former
from hvdtrain.errors import ADVICE, DIVERGED, USER, UserError, code_of

if TYPE_CHECKING:
    from hvdtrain.comm.communicator import Engine
    from hvdtrain.comm.placement import Placement
    from hvdtrain.config.schema import Config
    from hvdtrain.train.health.heartbeat import Pulse
    from hvdtrain.train.health.signals import Signals
    from hvdtrain.train.health.watchdog import Watch
    from hvdtrain.train.progress.train_state import Standing

Failed = Callable[[BaseException, "Engine | None"], "Outcome"]


class Outcome(NamedTuple):
    """What became of a job, on every rank."""

    code: int  # exit code
    run: Path | None = None  # the run folder, as rank 0 knows it
    why: str = ""  # it is over, or stopped
    standing: Standing | None = None


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
    from hvdtrain.train.build import check_watching
    from hvdtrain.train.health.deadline import check_time
    from hvdtrain.train.health.heartbeat import Pulse
    from hvdtrain.train.health.signals import Signals
    from hvdtrain.train.health.watchdog import Watch

    place = placement(os.environ)
    given = configure(path, words, None if place.rank == 0 else ())
    check_names(*given)
    check_time(*given)
    check_watching(*given)
    pulse = Pulse(of_process=not from_script)
    with (
        Signals(place.rank) as signals,
        Watch(pulse, signals, given[0].guard, place.rank) as watch,
        tagged_warnings(place.rank, place.size),
    ):
        return _train((path, words), given, place, (signals, pulse, watch), failed)


def _train(
    typed: tuple[str | None, list[str]],
    given: tuple[Config, Origins],
    place: Placement,
    eyes: tuple[Signals, Pulse, Watch],
    failed: Failed,
) -> Outcome:
    from hvdtrain.recipe.compose import for_ranks
    from hvdtrain.train.build import check_batch, connect
    from hvdtrain.train.job import prepare, train_job

    engine: Engine | None = None
    signals, pulse, watch = eyes
    try:
        pulse.beat("connecting the ranks", 0, 0)
        engine, why = connect(*given, place)
        watch.meet(engine)
        config, origins = for_ranks(*_of_all(typed, given, engine), place.size)
        check_batch(config, origins, place.size)
        pulse.beat("reading the data", 0, 0)
        parts = prepare(config, origins)
        outcome = Outcome(*train_job(config, origins, parts, engine, why, (signals, pulse)))
        engine.close()
        return outcome
    except BaseException as error:  # SystemExit too: a rank that leaves alone would let the others wait for ever
        return failed(error, engine)


def end_all(error: BaseException, engine: Engine | None) -> Outcome:
    """The error is told, and the job ends: in every process that belongs to it."""
    if isinstance(error, UserError):
        return Outcome(fail(f"hvdtrain: {error}", error.code, engine))
    if isinstance(error, BrokenPipeError):
        hush()
    code = code_of(error)
    advice = f"\nhvdtrain: {ADVICE[code]}" if code in ADVICE else ""
    return Outcome(fail(traceback.format_exc().rstrip() + advice, code, engine))


def raise_alone(error: BaseException, engine: Engine | None) -> Outcome:
    """For a script: raised where this process is the whole job."""
    if _is_alone(engine):
        raise error
    sys.exit(end_all(error, engine).code)


def _is_alone(engine: Engine | None) -> bool:
    if engine is not None:
        return engine.size == 1
    from hvdtrain.comm.placement import placement

    return placement(os.environ).size == 1


def _of_all(typed: tuple[str | None, list[str]], given: tuple[Config, Origins], engine: Engine) -> tuple[Config, Origins]:
    """The configuration of the job. That of a run to go on from is known to rank 0 alone: the hosts need not share a file system."""
    if given[0].resume in ("auto", "no"):
        return given
    from hvdtrain.train.same_state import on_rank_0

    return configure(*typed, on_rank_0(engine, lambda: read_former(assignments(*typed))))


def fail(text: str, code: int, engine: Engine | None) -> int:
    """Says what went wrong and ends the job: all ranks at once where an engine connects them, else by this rank's exit code."""
    rank, told_alike = _rank(engine), code in (USER, DIVERGED)
    if rank:
        time.sleep(ECHO_S)
    who = f"rank {rank} on {socket.gethostname()}"
    with contextlib.suppress(OSError):  # nobody reads it, as after the end of mpirun: the job ends all the same
        print(text if told_alike and not rank else f"{text}\n{who}: the error above ends the job", file=sys.stderr, flush=True)
    if engine is not None and engine.size > 1:
        _last_words()
        engine.abort(code)
    if engine is None and "mpi4py.MPI" in sys.modules:
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


def _rank(engine: Engine | None) -> int:
    if engine is not None:
        return engine.rank
    from hvdtrain.comm.placement import placement

    try:
        return placement(os.environ).rank
    except UserError:
        return 0
