"""python -m hvdtrain.extras.launch.rank [--plain] [--logs DIR] ... script|module|program WORD ...:
one rank of `launch -- train.py`."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import math
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from hvdtrain.comm.cores.bind import bind_alone
from hvdtrain.comm.cores.shares import BINDS
from hvdtrain.comm.launcher_variables import (
    BY_LAUNCH,
    SRUN,
    Placement,
    placement,
    torchrun_variables,
)
from hvdtrain.comm.rendezvous import LOOPBACK, step_nodes
from hvdtrain.core.early_signals import EarlySignals
from hvdtrain.core.ends_with_parent import end_with_parent
from hvdtrain.core.folder import NO_LINKS, Folder, WrongKind
from hvdtrain.core.process import exit_now, flush_output, print_stderr
from hvdtrain.errors import LOST, USER, UserError, exit_code_of, short
from hvdtrain.extras.launch.allocation import read_hosts
from hvdtrain.extras.launch.mpirun import Host
from hvdtrain.training.failure import (
    ECHO_S,
    abort_every_rank,
    end_every_rank,
    report_crashes,
    wait_for_the_report_of_another,
)

# ranks that fail at the same moment report one after the other: the first one ends the others
APART_S = 0.25
APART_RANKS = 8
# a rank that fails because of a lost connection or a request to stop waits for the rank that caused
# it
CONSEQUENCE_S = 4.0
LEAVE_S = (
    10  # for a rank that ends with an exit code: MPI waits at the end for ranks that may never come
)
_LAUNCHER = str(Path(__file__).parents[0])
HIDDEN_IN_STALLS = True  # training/health/stall_report.py omits calls of this module
Tell = Callable[[int], None]


def main() -> int:
    """Runs the words; returns their exit code. `launch` has checked what the user gave."""
    parser = argparse.ArgumentParser(prog="hvdtrain.extras.launch.rank", allow_abbrev=False)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--logs")
    parser.add_argument(
        "--hosts", help="n1:4,n2:4, the ranks of each host, where there are several"
    )
    parser.add_argument("--port", help="of MASTER_PORT, where the environment has none")
    parser.add_argument("--bind", choices=BINDS, default="none", help="as comm.bind")
    parser.add_argument("kind", choices=("script", "module", "program"))
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        place = placement(os.environ)
        rank = place.rank
        set_torch_variables(place, os.environ, options.hosts, options.port)
        log = log_of(options.logs, rank)
        for line in bind_alone(options.bind, place):
            print(f"hvdtrain launch: {line}", file=sys.stderr, flush=True)
    except UserError as error:
        print(f"hvdtrain: {error}", file=sys.stderr)
        return error.code
    tag = b"" if options.plain else f"[{rank}] ".encode()
    run = {"script": run_script, "module": run_module, "program": run_program}[options.kind]
    return Watched(
        lambda tell: run(options.words, rank, tell), prints_calls=options.kind != "program"
    ).run(tag, log)


def set_torch_variables(
    place: Placement, environ: MutableMapping[str, str], hosts: str | None, port: str | None
) -> None:
    """Sets the variables that torchrun sets, so that torch.distributed starts; MASTER_ADDR and
    MASTER_PORT keep the user's values.

    Raises UserError if another one is set to something else.
    """
    shares = read_hosts(hosts) if hosts else ()
    names = [host.name for host in shares] or step_nodes(environ)
    wanted = torchrun_variables(place, _node(place, shares, environ))
    for key, value in wanted.items():
        if environ.get(key, value) != value:
            what = (
                f"{key}={short(environ[key])} is set, but this is rank {place.rank} of "
                f"{place.size}, which should have {key}={value}"
            )
            raise UserError(
                what, f"the environment; the launcher is {place.launcher}", f"unset {key}"
            )
    environ.update(wanted, **{BY_LAUNCH: "1"})
    if place.local_size == place.size:
        environ.setdefault("MASTER_ADDR", LOOPBACK)
    elif names:
        environ.setdefault("MASTER_ADDR", names[0])
    if port is not None:
        environ.setdefault("MASTER_PORT", port)


def _node(
    place: Placement, shares: Sequence[Host], environ: Mapping[str, str]
) -> tuple[int, int] | None:
    """Returns the number of this host and how many there are; None if they are unknown, or ranks do
    not fill the hosts one after the other."""
    if place.local_size == place.size:
        return 0, 1
    if "SLURM_NODEID" in environ and place.launcher == SRUN.name:
        return int(environ["SLURM_NODEID"]), len(step_nodes(environ))
    first = 0
    for number, host in enumerate(shares):
        if (place.local_size, place.rank) == (host.slots, first + place.local_rank):
            return number, len(shares)
        first += host.slots
    return None


class StopRequest(EarlySignals):
    """Handles SIGUSR2, which `launch` sends for Ctrl-C: a script without its own handler gets the
    usual KeyboardInterrupt."""

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
    """Runs the program WORDS. Python in it does not buffer lines, unless the environment asks for
    it."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        print(
            f"hvdtrain launch: rank {rank} cannot run {words[0]}: {error.strerror}", file=sys.stderr
        )
        return USER


def _run(code: Callable[[], object], rank: int, tell: Tell) -> int:
    report_crashes()
    signal.signal(signal.SIGUSR2, StopRequest())
    # in C: where MPI waits, no handler of Python runs
    faulthandler.register(CALLS, all_threads=False)
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
        if (
            sys.excepthook is not sys.__excepthook__
        ):  # the script's own, or its open hvdtrain.init()'s
            time.sleep(echo_s)
            wait_for_the_report_of_another()
            sys.excepthook(type(error), error, error.__traceback__)
            abort_every_rank(exit_code_of(error), None)
            exit_now(exit_code_of(error))
        exit_now(end_every_rank(error, None, "script", echo_s=echo_s))
    finally:
        # Python does so at exit anyway, before MPI does, which may wait
        faulthandler.unregister(CALLS)
        signal.signal(CALLS, signal.SIG_IGN)
    return 0


def _leave(code: object, tell: Tell) -> int:
    """Returns the exit code that the script requested. An alarm then ends a process that still
    waits for other ranks."""
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
    """Removes the calls of this folder and of runpy, which do not belong to the script."""
    while trace and (trace.tb_frame.f_code.co_filename.startswith((_LAUNCHER, "<frozen runpy>"))):
        trace = trace.tb_next
    return trace


# A launcher sends them only to this process: the child has its own session, so it receives none of
# them twice.
FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
# asks a child that listens for it to print its calls on its standard error
CALLS = signal.SIGRTMIN + 5
SLOW_S = 3.0  # after a request to stop the child is asked for its calls: it may hang in one
IDLE_S = 0.5  # after which the beginning of a line is passed on without its end
DRAIN_S = 2.0  # after the child's end, for output of processes that it has left
_READ_BYTES = 2**16
_STDOUT = 1
_STDERR = 2


def log_of(folder: str | None, rank: int) -> io.FileIO | None:
    """Opens the rank's file in the folder, on its host, to append to it. Raises UserError."""
    if folder is None:
        return None
    name = f"rank-{rank}.log"
    try:
        with Folder.make(Path(folder)) as logs:
            return logs.append(name)
    except WrongKind as error:
        raise UserError(f"{name} is {error.strerror}", f"--logs {folder}", NO_LINKS) from None
    except OSError as error:
        raise UserError(
            f"cannot write {name}: {error.strerror}",
            f"--logs {folder}",
            "a folder that each host may write to",
        ) from None


class Watched:
    """target: called in the child with a function that tells this process the exit code that the
    child means to end with; it returns it.

    prints_calls: whether the child listens for CALLS.
    """

    def __init__(
        self, target: Callable[[Callable[[int], None]], int], *, prints_calls: bool = False
    ) -> None:
        self._target = target
        self._prints_calls = prints_calls
        self._tag = b""
        self._asked_s: float | None = None  # time.monotonic() of the first request to stop
        self._child = 0
        self._status = 0  # the child's exit status, once it has ended

    def run(self, tag: bytes, log: io.FileIO | None) -> int:
        """Runs the child to its end; returns its exit code, or 128 + signal if a signal ended it.

        tag: printed before each line; log: gets the unchanged bytes. Call it before other threads
        are started.
        """
        self._tag = tag
        output = os.pipe()
        errors = os.pipe()
        word = os.pipe()
        # until both processes know what to do with them
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        former = {number: signal.getsignal(number) for number in FORWARDED}
        for number, handler in former.items():
            if (
                handler is not signal.SIG_IGN
            ):  # the parent process set it so, as nohup does with SIGHUP
                signal.signal(number, self._forward)
        ours = os.getpid()
        self._child = os.fork()
        if not self._child:
            for number, handler in former.items():
                signal.signal(number, handler)
            self._be_child(ours, output[1], errors[1], word[1])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        for _, of_the_child in (output, errors, word):
            os.close(of_the_child)
        _Streams(
            {output[0]: (_STDOUT, TaggedLines(tag)), errors[0]: (_STDERR, TaggedLines(tag))}, log
        ).pass_on(self._has_ended)
        told = os.read(word[0], 16)
        code = os.waitstatus_to_exitcode(self._status)
        if code == -signal.SIGALRM and told:  # it meant to end, and hung
            return int(told)
        return code if code >= 0 else 128 - code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if not self._child:
            return  # it has ended
        if number == signal.SIGUSR2 and self._asked_s is None:
            self._asked_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _has_ended(self) -> bool:
        if self._child:
            pid, self._status = os.waitpid(self._child, os.WNOHANG)
            if pid:
                self._child = 0
        if (
            self._child
            and self._prints_calls
            and self._asked_s is not None
            and time.monotonic() - self._asked_s > SLOW_S
        ):
            self._asked_s = math.inf  # once
            _write(
                _STDERR,
                self._tag
                + f"hvdtrain launch: not ended {SLOW_S:g} s after the request to stop\n".encode(),
            )
            os.kill(self._child, CALLS)
        return not self._child

    def _be_child(self, parent: int, output: int, errors: int, word: int) -> NoReturn:
        os.setsid()
        end_with_parent(parent, signal.SIGKILL)
        os.dup2(output, _STDOUT)
        os.dup2(errors, _STDERR)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)  # a pipe would keep lines back
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        sys.exit(self._target(lambda code: _write(word, f"{code}".encode())))


class _Streams:
    """The streams of a child, and their destinations."""

    def __init__(self, streams: dict[int, tuple[int, TaggedLines]], log: io.FileIO | None) -> None:
        self._streams = streams
        self._log = log

    def pass_on(self, has_ended: Callable[[], bool]) -> None:
        """Copies until both streams end, or DRAIN_S after the child has ended."""
        quiet_s = 0.0
        while self._streams and quiet_s < DRAIN_S:
            ended = has_ended()
            ready, _, _ = select.select(list(self._streams), [], [], IDLE_S)
            for source in ready:
                self._read(source)
            quiet_s = quiet_s + IDLE_S if ended and not ready else 0.0
            if not ready:
                for target, lines in self._streams.values():
                    _write(target, lines.flush())
        for target, lines in self._streams.values():
            _write(target, lines.end())
        while not has_ended():
            select.select([], [], [], IDLE_S / 10)

    def _read(self, source: int) -> None:
        target, lines = self._streams[source]
        data = os.read(source, _READ_BYTES)
        if not data:
            _write(target, lines.end())
            del self._streams[source]
            return
        _write(target, lines.take(data))
        if self._log is not None:
            try:
                self._log.write(data)
            except OSError as error:
                print_stderr(
                    f"hvdtrain launch: the log file of this rank ends here: {error.strerror}"
                )
                self._log = None


def _write(target: int, data: bytes) -> None:
    """Drops what a closed pipe does not accept, so that the log file is still written."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]


LONGEST = 2**16  # bytes of a line that are kept until its end comes


class TaggedLines:
    """Tags the lines of one stream. Progress bars, whose lines end with a carriage return, get the
    tag each time."""

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._rest = b""  # without its end, not passed on yet
        self._is_within = False  # a line whose beginning was passed on

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)

    def take(self, data: bytes) -> bytes:
        """Returns the lines that this piece completes, tagged."""
        lines = (self._rest + data).splitlines(keepends=True)
        # a carriage return at the end of a piece may be half of \r\n
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        text = b"".join(map(self._tagged, lines))
        return text + self.flush() if len(self._rest) > LONGEST else text

    def flush(self) -> bytes:
        """Returns an incomplete line, such as a prompt."""
        rest = self._rest
        self._rest = b""
        return self._tagged(rest) if rest else b""

    def end(self) -> bytes:
        """Returns the rest, tagged, when nothing follows. Adds the missing line end, so that no
        other rank's line continues it."""
        rest = self.flush() + b"\n" * self._is_within
        self._is_within = False
        return rest

    def _tagged(self, line: bytes) -> bytes:
        tag = b"" if self._is_within else self._tag
        self._is_within = not line.endswith((b"\n", b"\r"))
        return tag + line


if __name__ == "__main__":
    sys.exit(main())
