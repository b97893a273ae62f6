"""python -m hvdtrain.cli.launch.rank [--plain] [--logs DIR] script|module|program WORD ...: one rank of `launch -- train.py`."""

from __future__ import annotations

import argparse
import faulthandler
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from hvdtrain.cli.launch.watched import CALLS, Watched, log_of
from hvdtrain.comm.placement import placement
from hvdtrain.core.early_signals import EarlySignals
from hvdtrain.core.process import exit_now, flush_output
from hvdtrain.errors import LOST, USER, UserError, exit_code_of
from hvdtrain.training.failure import ECHO_S, abort_every_rank, end_every_rank, report_crashes, wait_for_the_report_of_another


def main() -> int:
    """Runs the words; returns their exit code. `launch` has checked what the user gave."""
    parser = argparse.ArgumentParser(prog="hvdtrain.cli.launch.rank", allow_abbrev=False)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--logs")
    parser.add_argument("kind", choices=("script", "module", "program"))
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        rank = placement(os.environ).rank
        log = log_of(options.logs, rank)
    except UserError as error:
        print(f"hvdtrain: {error}", file=sys.stderr)
        return error.code
    tag = b"" if options.plain else f"[{rank}] ".encode()
    run = {"script": run_script, "module": run_module, "program": run_program}[options.kind]
    return Watched(lambda tell: run(options.words, rank, tell), prints_calls=options.kind != "program").run(tag, log)


APART_S, APART_RANKS = 0.25, 8  # ranks that fail at the same moment report one after the other: the first one ends the others
CONSEQUENCE_S = 4.0  # what a lost connection, or a request to stop, raises waits for the rank that was the cause
LEAVE_S = 10  # for a rank that ends with an exit code: MPI waits at the end for ranks that may never come
_LAUNCHER = str(Path(__file__).parents[0])
Tell = Callable[[int], None]


class StopRequest(EarlySignals):
    """SIGUSR2, which `launch` sends for Ctrl-C: a script without a handler of its own gets the KeyboardInterrupt that is usual."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        super().__call__(number, frame)
        raise KeyboardInterrupt


def run_script(words: Sequence[str], rank: int, tell: Tell) -> int:
    """Runs a script as `python WORDS` does; returns the exit code."""
    sys.argv = list(words)
    sys.path[0] = str(Path(words[0]).resolve().parent)
    return _run(lambda: runpy.run_path(words[0], run_name="__main__"), rank, tell)


def run_module(words: Sequence[str], rank: int, tell: Tell) -> int:
    """Runs a module as `python -m WORDS` does."""
    sys.argv = list(words)
    return _run(lambda: runpy.run_module(words[0], run_name="__main__", alter_sys=True), rank, tell)


def run_program(words: Sequence[str], rank: int, tell: Tell) -> int:
    """Runs the program WORDS. Python in it does not keep lines back, unless the environment says something else."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        print(f"hvdtrain launch: rank {rank} cannot run {words[0]}: {error.strerror}", file=sys.stderr)
        return USER


def _run(code: Callable[[], object], rank: int, tell: Tell) -> int:
    report_crashes()
    signal.signal(signal.SIGUSR2, StopRequest())
    faulthandler.register(CALLS, all_threads=False)  # in C: where MPI waits, no handler of Python runs
    try:
        code()
    except SystemExit as ending:
        return _leave(ending.code, tell)
    except KeyboardInterrupt:
        return _leave(128 + signal.SIGINT, tell)
    except BaseException as error:
        error.__traceback__ = _own_part(error.__traceback__)
        echo_s = APART_S * min(rank, APART_RANKS)
        echo_s += CONSEQUENCE_S if exit_code_of(error) == LOST else ECHO_S if rank else 0.0
        if sys.excepthook is not sys.__excepthook__:  # the script's own, or that of its open hvdtrain.init()
            time.sleep(echo_s)
            wait_for_the_report_of_another()
            sys.excepthook(type(error), error, error.__traceback__)
            abort_every_rank(exit_code_of(error), None)
            exit_now(exit_code_of(error))
        exit_now(end_every_rank(error, None, "script", echo_s=echo_s))
    finally:
        faulthandler.unregister(CALLS)  # the end of Python does so anyway, before that of MPI, which may wait
        signal.signal(CALLS, signal.SIG_IGN)
    return 0


def _leave(code: object, tell: Tell) -> int:
    """The exit code that the script asked for. Whoever waits for other ranks after that is ended by an alarm."""
    if code is None or code == 0:
        return 0
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    flush_output()
    tell(code & 0xFF)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LEAVE_S)
    return code


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """Without the calls of this folder and of runpy, which are no part of the script."""
    while trace and (trace.tb_frame.f_code.co_filename.startswith((_LAUNCHER, "<frozen runpy>"))):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main())
