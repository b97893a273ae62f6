"""This process: exiting while threads or other ranks may hang, standard error, its command line,
and children that end with it."""

from __future__ import annotations

import _thread
import contextlib
import os
import shlex
import shutil
import signal
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import subprocess

WAIT_S = 3.0  # less than the watchdog and an abort allow a process to end
_PROGRAM = [sys.executable, "-I", "-S", str(Path(__file__).with_name("ends_with_parent.py"))]


def exit_now(code: int) -> NoReturn:
    """Ends this process immediately, from any thread, without the cleanup at exit, which would wait
    for other ranks."""
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Flushes standard output and standard error; ignores a closed pipe, so that it does not keep a
    rank alive."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


class StderrWrite:
    """A write on a separate thread, so that nothing has to wait for it.

    threading.Thread cannot be used: its start() waits forever if memory is so short that the new
    thread ends before its first line.
    """

    def __init__(self, number: int, data: bytes) -> None:
        self._number = number
        self._data = data
        self._begun = threading.Lock()
        self._ended = threading.Event()

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError if the system has no more threads."""
        _thread.start_new_thread(self.run, ())

    def run(self) -> None:
        """Writes the text, in the first thread that calls it."""
        if self._begun.acquire(blocking=False):
            _write_all(self._number, self._data)
            self._ended.set()

    def wait(self, wait_s: float) -> None:
        self._ended.wait(wait_s)

    def is_alive(self) -> bool:
        return not self._ended.is_set()


def write_stderr(text: str, wait_s: float = WAIT_S) -> StderrWrite | None:
    """Writes lines to standard error, bypassing Python's buffers, because a hanging thread may hold
    their lock.

    If the reader has paused (Ctrl-S, a full pipe), waits at most wait_s and returns the unfinished
    write.
    """
    number = sys.__stderr__.fileno() if sys.__stderr__ else 2
    write = StderrWrite(number, f"{text}\n".encode(errors="replace"))
    with contextlib.suppress(RuntimeError):  # no more threads (ulimit -u)
        write.start()
        write.wait(wait_s)
    write.run()  # if the thread has not started
    return write if write.is_alive() else None


def print_stderr(text: str, wait_s: float = WAIT_S) -> StderrWrite | None:
    """Prints to the replacement of sys.stderr by a notebook, a test or the progress display, if
    there is one."""
    if sys.stderr is sys.__stderr__ or sys.stderr is None:
        return write_stderr(text, wait_s)
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
    return None


def _write_all(number: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # a closed pipe, a closed terminal, a full disk
        while data:
            data = data[os.write(number, data) :]


def command_line(*arguments: str) -> str:
    """Returns the quoted command that starts this program: `hvdtrain ...` if the shell finds this
    environment's script, else its path."""
    return shlex.join([*_program(), *arguments])


def path_argument(path: Path) -> str:
    """Returns a path as an argument that is not mistaken for an option: ./-x for -x."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _program() -> list[str]:
    folders = [
        os.path.dirname(sys.executable),
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", f"{os.name}_user"),
    ]
    scripts = [Path(folder, "hvdtrain") for folder in folders]
    path = shutil.which("hvdtrain")
    if path and any(script.exists() and script.samefile(path) for script in scripts):
        return ["hvdtrain"]
    script = next((script for script in scripts if os.access(script, os.X_OK)), None)
    if script is None:  # imported from a source tree
        return [sys.executable or "python", "-m", "hvdtrain"]
    below = os.path.relpath(script)
    return [str(script) if below.startswith(os.pardir) else below]


def start_child(
    command: Sequence[str],
    environ: Mapping[str, str],
    at_our_end: signal.Signals,
    *,
    new_session: bool = False,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a child that gets the signal `at_our_end` when this process ends for any reason; it
    exits with 127 if it cannot be started.

    output: receives its standard output and error; the child then has no input.
    """
    import subprocess  # 5 ms, which most commands do not need

    return subprocess.Popen(
        [*_PROGRAM, str(os.getpid()), str(int(at_our_end)), *command],
        env=environ,
        start_new_session=new_session,
        stdin=None if output is None else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
