"""The end of all ranks where one fails: the error is reported, and every process of the job ends within seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING

from hvdtrain.errors import ADVICE, DIVERGED, USER, UserError, exit_code_of

if TYPE_CHECKING:
    from hvdtrain.comm.communicator import Communicator

ECHO_S = 1.5  # most errors of one rank happen on all: the other ranks wait this long for rank 0 to report the error and to end the job
UNCONNECTED_ECHO_S = 5.0  # before they are connected only the launcher ends the other ranks, once the process of rank 0 is gone
FLUSH_S = 0.2  # mpirun prints its own message between the pieces of ours that it has not passed on yet
ABORT_S = 10  # an abort that hangs ends by SIGALRM


class RankFailed(Exception):
    """The job is over with this exit code: the error was reported already."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def end_every_rank(error: BaseException, communicator: Communicator | None, what: str = "job") -> int:
    """Reports the error on the standard error and ends all ranks: if one rank ended alone, the others would wait forever.

    `communicator` is None before the ranks are connected. Returns the exit code where no other rank is connected to this one.
    """
    if isinstance(error, BrokenPipeError):
        discard_stdout()
    code = exit_code_of(error)
    message = f"hvdtrain: {error}" if isinstance(error, UserError) else "".join(traceback.format_exception(error)).rstrip()
    if code in ADVICE:
        message += f"\nhvdtrain: {ADVICE[code]}"
    rank = _rank(communicator)
    if rank:
        time.sleep(ECHO_S if communicator is not None else UNCONNECTED_ECHO_S)
    if rank or code not in (USER, DIVERGED):  # of those two rank 0's message is that of all ranks
        message += f"\nrank {rank} on {socket.gethostname()}: the error above ends the {what}"
    with contextlib.suppress(OSError):  # a closed pipe, as after the end of mpirun
        print(message, file=sys.stderr, flush=True)
    _abort(code, communicator)
    return code


def discard_stdout() -> None:
    """After the reader of the standard output has gone: what is left of it must not change the exit code to Python's 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_only_process(communicator: Communicator | None) -> bool:
    """Whether this process is the whole job."""
    if communicator is not None:
        return communicator.size == 1
    from hvdtrain.comm.placement import placement

    return placement(os.environ).size == 1


def _abort(code: int, communicator: Communicator | None) -> None:
    """Returns only where no other rank is connected to this one."""
    if communicator is not None and communicator.size > 1:
        _prepare_abort()
        communicator.abort(code)
    if communicator is None and "mpi4py.MPI" in sys.modules:  # a rank that failed while it connected
        from hvdtrain.comm.mpi import abort_world, has_several_ranks

        if has_several_ranks():
            _prepare_abort()
            abort_world(code)


def _prepare_abort() -> None:
    time.sleep(FLUSH_S)
    signal.alarm(ABORT_S)


def _rank(communicator: Communicator | None) -> int:
    if communicator is not None:
        return communicator.rank
    from hvdtrain.comm.placement import placement

    try:
        return placement(os.environ).rank
    except UserError:
        return 0
