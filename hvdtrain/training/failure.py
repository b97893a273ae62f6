"""Ends all ranks when one fails: reports the error, including limits of the system, and ends every
process within seconds."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import hashlib
import io
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from hvdtrain.core.own_line import own_frame, without_frames_of_hvdtrain
from hvdtrain.core.process import print_stderr
from hvdtrain.errors import ADVICE, DIVERGED, MEMORY, USER, UserError, exit_code_of

if TYPE_CHECKING:
    from hvdtrain.comm.communicator import Communicator


# most errors of one rank happen on all: the other ranks wait this long for rank 0 to report the
# error and to end the job
ECHO_S = 1.5
# before ranks are connected, only the launcher ends the other ranks, after rank 0's process has
# ended
UNCONNECTED_ECHO_S = 5.0
FLUSH_S = 0.2  # mpirun prints its message between pieces of ours that it has not forwarded yet
ABORT_S = 10  # an abort that hangs ends by SIGALRM
# a rank waits this long to be ended by another rank of its host that reports an error
NEXT_S = 10.0
# What the ranks of a job have in common. Jobs of one SLURM step that share it wait for each other's
# reports, too.
_JOB = (
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_PORT",
    "SUBMITIT_LOCAL_JOB_ID",
)
_held: list[socket.socket] = []  # held until the process ends, if it has an error to report


def report_crashes() -> None:
    """Makes a process print its stack when the system kills it: a bus error, after a mapped file
    was truncated, is silent otherwise."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(
            ValueError, AttributeError, RuntimeError
        ):  # a standard error that is not a file, as in a notebook
            faulthandler.enable()


class RankFailed(Exception):
    """Ends the job with this exit code: the error has already been reported."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def end_every_rank(
    error: BaseException,
    communicator: Communicator | None,
    what: str = "job",
    doing: str = "",
    *,
    echo_s: float | None = None,
) -> int:
    """Reports the error on the standard error and ends all ranks: if one rank ended alone, the
    others would wait forever.

    communicator: None before the ranks are connected. doing: the rank's place in the mesh, and its
    activity. echo_s: how long to wait for another rank's report, instead of the default. Returns
    the exit code if no other rank is connected to this one.
    """
    if isinstance(error, BrokenPipeError):
        discard_unwritten_output()
    error = limit_reached(error) or error
    code = exit_code_of(error)
    message = (
        _of_user_error(error)
        if isinstance(error, UserError)
        else "".join(traceback.format_exception(error)).rstrip()
    )
    if code in ADVICE:
        message += f"\nhvdtrain: {ADVICE[code]}"
    rank = _rank(communicator)
    if echo_s is not None:
        time.sleep(echo_s)
    elif rank:
        time.sleep(ECHO_S if communicator is not None else UNCONNECTED_ECHO_S)
    wait_for_the_report_of_another(communicator)
    if rank or code not in (USER, DIVERGED):  # for these two codes, rank 0 reports for all ranks
        message += (
            f"\nrank {rank} on {socket.gethostname()}{doing}: the error above ends the {what}"
        )
    print_stderr(message)
    abort_every_rank(code, communicator)
    return code


def _of_user_error(error: UserError) -> str:
    """Formats the error's three lines. If user code raised its cause, they follow its traceback,
    which shows the line of user code."""
    lines = [f"hvdtrain: {error}", *getattr(error, "__notes__", ())]
    if error.__cause__ is not None and own_frame(error.__cause__) is not None:
        lines.insert(0, without_frames_of_hvdtrain(error.__cause__))
    return "\n".join(lines)


class _UserErrorHook:
    """A sys.excepthook that prints an uncaught UserError without a traceback, with the script's
    line, and exits with its code."""

    installed = False

    def __init__(self) -> None:
        self._former = sys.excepthook
        self._process = os.getpid()

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, UserError) or os.getpid() != self._process:
            self._former(kind, error, trace)
            return
        frame = own_frame(error)
        if frame is not None and not getattr(error, "__notes__", ()):
            error.add_note(f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}")
        # torch.distributed's hook, which calls this one, shows what was printed meanwhile, except
        # for SystemExit
        shown = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
        with contextlib.redirect_stderr(shown):
            code = end_every_rank(error, None, "script")
        raise SystemExit(code)  # Python then ends as after any exception


def report_user_errors() -> None:
    """Installs the hook in a script, but not if an interpreter shows its own tracebacks."""
    if not (_UserErrorHook.installed or hasattr(sys, "ps1") or sys.flags.interactive):
        _UserErrorHook.installed = True
        sys.excepthook = _UserErrorHook()


def wait_for_the_report_of_another(communicator: Communicator | None = None) -> None:
    """Waits until no other rank of the job on this host is reporting an error, NEXT_S at most: the
    reporting rank ends the others.

    The reporting rank holds an abstract Unix address (unix(7)); nobody can connect to it, and it is
    free again when the process ends.
    """
    with contextlib.suppress(
        UserError
    ):  # about a launcher's variables: it may be the error being reported
        if is_only_process(communicator):
            return
    if _held or not any(key in os.environ for key in _JOB):
        return
    job = "/".join(os.environ.get(key, "") for key in _JOB)
    address = "\0hvdtrain/" + hashlib.sha256(job.encode()).hexdigest()
    _held.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    waited = False
    until_s = time.monotonic() + NEXT_S
    while time.monotonic() < until_s:
        try:
            _held[0].bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return  # on a system without such addresses, only ECHO_S separates the reports
            waited = True
            time.sleep(0.05)
        else:
            if waited:
                # the other rank has just ended, so this one ends, too, unless the two are not
                # connected
                time.sleep(ECHO_S)
            return


def discard_unwritten_output() -> None:
    """Drops output that a closed pipe or a full disk does not accept: Python would retry at exit,
    and exit with 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before the start
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_only_process(communicator: Communicator | None) -> bool:
    """Whether this process is the whole job."""
    if communicator is not None:
        return communicator.size == 1
    from hvdtrain.comm.launcher_variables import placement

    return placement(os.environ).size == 1


def abort_every_rank(code: int, communicator: Communicator | None) -> None:
    """Ends all ranks without a message. Returns only if no other rank is connected to this one."""
    if communicator is not None and communicator.size > 1:
        _prepare_abort()
        communicator.abort(code)
    if communicator is None and "mpi4py.MPI" in sys.modules:  # this rank failed while connecting
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
    from hvdtrain.comm.launcher_variables import placement

    try:
        return placement(os.environ).rank
    except UserError:
        return 0


_UNLIMITED = resource.RLIM_INFINITY
# with fewer NumPy's OpenBLAS ends the process by itself, while it is loaded or at its first use
_LEAST_ADDRESSES = 2**28
# messages of the dynamic loader
_NO_MEMORY = (
    "failed to map segment",
    "annot allocate memory",
    "cannot map",
)


def check_limits() -> None:
    """Called before NumPy is imported. Raises UserError if `ulimit -v` leaves less address space
    than any job needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != _UNLIMITED and soft < _LEAST_ADDRESSES:
        raise _no_addresses_left()


def limit_reached(error: BaseException) -> UserError | None:
    """Returns the error for a limit of the system; None for any other error."""
    for each in _chain(error):
        if isinstance(each, RuntimeError) and "can't start new thread" in str(each):
            return _no_threads()
        if isinstance(each, MemoryError) or (
            isinstance(each, ImportError) and any(text in str(each) for text in _NO_MEMORY)
        ):
            return _no_addresses(each)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and the errors in whose handling it was raised, newest first. (Joining a
    thread that never started raises a second error.)"""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or each.__context__


def _no_threads() -> UserError:
    limits = [
        *_limit("u", resource.RLIMIT_NPROC, 1, " (threads of this user)"),
        *_limit("v", resource.RLIMIT_AS, 1024, " kB"),
    ]
    limits += _limit("d", resource.RLIMIT_DATA, 1024, " kB")  # the stacks of threads count
    where = (
        ", ".join(limits) or "the container's or the batch system's limit of processes (pids.max)"
    )
    return UserError(
        "the system refuses this process more threads",
        where,
        "raise the limit; or fewer: OMP_NUM_THREADS=1 data.readers=1",
    )


def _no_addresses(error: BaseException) -> UserError | None:
    """Returns the error for exhausted address space; None without `ulimit -v`: the memory itself is
    then used up."""
    if not _limit("v", resource.RLIMIT_AS, 1024, ""):
        return None
    limit = _no_addresses_left()
    if isinstance(error, MemoryError):
        limit.code = MEMORY
    return limit


def _no_addresses_left() -> UserError:
    where = ", ".join(_limit("v", resource.RLIMIT_AS, 1024, " kB"))
    fix = "ulimit -v unlimited: libraries reserve far more address space than the memory they use"
    return UserError("this process has no more address space", where, fix)


def _limit(option: str, which: int, unit: int, name: str) -> list[str]:
    """Returns the limit as a list of one text; empty without a limit."""
    soft, _ = resource.getrlimit(which)
    return [] if soft == _UNLIMITED else [f"ulimit -{option} {soft // unit}{name}"]
