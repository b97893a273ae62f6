"""The command line: train, plan, check, launch, bench, export, list, and help; any exception on any rank ends every rank."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvdtrain import __version__, manual
from hvdtrain.configure import Origins, assignments, configure, read_former, to_yaml
from hvdtrain.errors import ADVICE, DIVERGED, DONE, USER, UserError, code_of
from hvdtrain.leaf import check_names

if TYPE_CHECKING:
    from hvdtrain.comm.engine import Engine
    from hvdtrain.comm.placement import Placement
    from hvdtrain.config import Config
    from hvdtrain.run.pulse import Pulse
    from hvdtrain.run.signals import Signals
    from hvdtrain.run.watch import Watch

LAST_WORDS_S = 0.2  # mpirun puts its own text between the pieces of ours that it has not passed on yet
END_S = 10  # an abort that hangs ends by SIGALRM
ECHO_S = 1.5  # what one rank stumbles over most often stops all: the others wait this long for rank 0 to tell it and end the job


def main(argv: Sequence[str] | None = None) -> int:
    """The whole program on one rank; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(words)
    except UserError as error:
        return _fail(f"hvdtrain: {error}", USER, None)
    except BrokenPipeError:  # `hvdtrain --help | head`: the reader has seen enough
        _hush()
        return DONE
    finally:
        if argv is None:
            _ignore_late_wishes()


def _ignore_late_wishes() -> None:
    """The process is about to end: a scheduler's wish for a checkpoint comes too late, and must not kill what has ended by itself."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


def _command(words: list[str]) -> int:
    name = words[0] if words else ""
    if name in ("export", "launch", "bench"):  # which tell about themselves
        return _other(name, words[1:])
    asks = next((place for place, word in enumerate(words) if word in ("-h", "--help")), None)
    if asks is not None:
        print(manual.help_text(words[asks + 1] if len(words) > asks + 1 else None))
    elif words == ["--version"]:
        print(f"hvdtrain {__version__}")
    elif words == ["list"]:
        print(manual.list_text())
    elif name in ("plan", "check"):
        return _other(name, words[1:])
    elif any(word.startswith(("--num-nodes", "--node-id", "--num-gpus")) for word in words):
        from hvdtrain.launch.hand import start

        return start(words)
    else:
        path, words = _take_option(words[words[:1] == ["train"] :], "--config")
        limit, words = _take_option(words, "--max-time")
        words += [f"guard.max_time={limit}"] * (limit is not None)
        if "--print-config" not in words:
            return run(path, words)
        config, origins = configure(path, [word for word in words if word != "--print-config"])
        check_names(config, origins)
        print(to_yaml(config), end="")
    return DONE


def _other(command: str, words: list[str]) -> int:
    """A command of hvdtrain/launch: the function of its file's name."""
    function: Callable[[list[str]], int] = getattr(importlib.import_module(f"hvdtrain.launch.{command}"), command)
    return function(words)


def run(path: str | None, words: list[str]) -> int:
    """Trains, and ends every rank where one fails."""
    from hvdtrain.comm.placement import placement
    from hvdtrain.run.deadline import check_time
    from hvdtrain.run.pulse import Pulse
    from hvdtrain.run.signals import Signals
    from hvdtrain.run.watch import Watch

    place = placement(os.environ)
    given = configure(path, words, None if place.rank == 0 else ())
    check_names(*given)
    check_time(*given)
    pulse = Pulse()
    with Signals(place.rank) as signals, Watch(pulse, signals, given[0].guard, place.rank) as watch:
        return _run((path, words), given, place, (signals, pulse, watch))


def _run(typed: tuple[str | None, list[str]], given: tuple[Config, Origins], place: Placement, eyes: tuple[Signals, Pulse, Watch]) -> int:
    from hvdtrain.recipe.compose import for_ranks
    from hvdtrain.run.build import check_batch, connect
    from hvdtrain.run.job import prepare, train_job

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
        code = train_job(config, origins, parts, engine, why, (signals, pulse))
        engine.close()
        return code
    except UserError as error:
        return _fail(f"hvdtrain: {error}", error.code, engine)
    except BaseException as error:  # SystemExit too: a rank that leaves alone would let the others wait for ever
        if isinstance(error, BrokenPipeError):
            _hush()
        code = code_of(error)
        advice = f"\nhvdtrain: {ADVICE[code]}" if code in ADVICE else ""
        return _fail(traceback.format_exc().rstrip() + advice, code, engine)


def _of_all(typed: tuple[str | None, list[str]], given: tuple[Config, Origins], engine: Engine) -> tuple[Config, Origins]:
    """The configuration of the job. That of a run to go on from is known to rank 0 alone: the hosts need not share a file system."""
    if given[0].resume in ("auto", "no"):
        return given
    from hvdtrain.run.start import on_rank_0

    return configure(*typed, on_rank_0(engine, lambda: read_former(assignments(*typed))))


def _fail(text: str, code: int, engine: Engine | None) -> int:
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


def _last_words() -> None:
    time.sleep(LAST_WORDS_S)
    signal.alarm(END_S)


def _hush() -> None:
    """Nobody reads the standard output any more: what is left of it must not change the exit code, to Python's 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _rank(engine: Engine | None) -> int:
    if engine is not None:
        return engine.rank
    from hvdtrain.comm.placement import placement

    try:
        return placement(os.environ).rank
    except UserError:
        return 0


def _take_option(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of `--option VALUE` or `--option=VALUE`, and the other words."""
    for place, word in enumerate(words):
        if word.startswith(f"{option}="):
            return word.partition("=")[2], words[:place] + words[place + 1 :]
        if word == option:
            if place + 1 == len(words):
                example = {"--config": "configs/fashion_mnist.yaml", "--max-time": "3.5h"}[option]
                raise UserError(f"{option} needs a value", "command line", f"{option} {example}")
            return words[place + 1], words[:place] + words[place + 2 :]
    return None, words


if __name__ == "__main__":
    sys.exit(main())
