"""Runs a submission on its ranks, under a time limit; none of its processes outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

from hvdtrain.extras.launch.mpirun import (
    LaunchRequest,
    available_cores,
    find_launcher,
    mpirun_command,
)

_PR_SET_CHILD_SUBREAPER = (
    36  # of <sys/prctl.h>: processes whose parent ends become children of this one
)
_POLL_S = 0.05
_LATE_S = 1.0  # between a job's end and the look at it, on a busy machine
_GRACE_S = 3.0  # between mpirun's SIGTERM and SIGKILL
_SHOWN_BYTES = 2000  # of the end of the output
_READ_BYTES = 2**16


class Ended(NamedTuple):
    """How a job ended."""

    how: Literal["by itself", "too slow", "hangs"]
    code: int  # exit code of mpirun; negative: the signal that ended it
    seconds: float  # from mpirun's start to its end, or to the limit
    output: str  # its end, of standard output and error


class _Output:
    """What a job prints, read from its pipe: only the end is kept, in memory."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self.pipe = pipe
        self.end = b""
        self.open = True

    def read(self, wait_s: float) -> bool:
        """Whether something came; waits for it, but not longer."""
        if not self.open:
            time.sleep(wait_s)
            return False
        if not select.select([self.pipe], [], [], wait_s)[0]:
            return False
        block = os.read(self.pipe, _READ_BYTES)
        self.open = block != b""
        self.end = (self.end + block)[-_SHOWN_BYTES:]
        return self.open

    @property
    def text(self) -> str:
        return self.end.decode(errors="replace").strip()


def run_job(
    script: Path,
    arguments: list[str],
    ranks: int,
    limit_s: float,
    silence_s: float,
    temporary: Path,
) -> Ended:
    """`mpirun -np RANKS python -m mpi4py SCRIPT ARGUMENTS` in the script's folder. Call it in a
    process that has no other children.

    With `-m mpi4py` an exception on one rank ends all; without it a rank that used mpi4py would
    wait for the others at its exit. silence_s: a job that has printed nothing for so long hangs;
    before its first line half the limit, too, as a busy machine starts Python slowly. temporary: a
    folder for its TMPDIR. Raises UserError without an mpirun.
    """
    launcher = find_launcher("")
    program = (sys.executable, "-m", "mpi4py", script.name, *arguments)
    request = LaunchRequest(
        launcher.path, ranks, program, as_root=os.geteuid() == 0, oversubscribe=True
    )
    threads = str(max(1, available_cores() // ranks))
    environ = {"OMP_NUM_THREADS": threads, "OMPI_MCA_mpi_yield_when_idle": "1", **os.environ}
    environ |= {"PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary)}
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    start = time.monotonic()
    job = subprocess.Popen(
        mpirun_command(launcher.kind, request),
        cwd=script.parent,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert job.stdout is not None
    with job.stdout as pipe:
        output = _Output(pipe.fileno())
        try:
            first_s = max(silence_s, limit_s / 2)
            how = _watch(job, output, start + limit_s, silence_s, first_s)
            seconds = time.monotonic() - start
        finally:
            _end(job)
        while output.read(0):  # what is left in the pipe: nobody writes any more
            pass
    return Ended(how, job.returncode, seconds, output.text)


def _watch(
    job: subprocess.Popen[bytes], output: _Output, end_s: float, silence_s: float, first_s: float
) -> Literal["by itself", "too slow", "hangs"]:
    """Until the job has ended, or has to be ended. end_s: of time.monotonic(). first_s: how long
    the first line may take."""
    printed_s = time.monotonic()
    allowed_s = first_s
    while job.poll() is None:
        printed = output.read(_POLL_S)
        now = time.monotonic()
        if printed:
            printed_s = now
            allowed_s = silence_s
        if now > end_s:
            return "too slow"
        if now - printed_s > allowed_s:
            return "hangs"
    # of a job that stopped this process meanwhile
    return "too slow" if time.monotonic() > end_s + _LATE_S else "by itself"


def _end(job: subprocess.Popen[bytes]) -> None:
    """Ends mpirun, then every process that is left, also one that left mpirun's session."""
    if job.poll() is None:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_GRACE_S)
    job.kill()  # does nothing where it has ended
    job.wait()
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_S)


def descendants(root: int) -> set[int]:
    """Processes below one, also those that have ended and that nobody has waited for."""
    parents = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(process.name)] = int(
                    (process / "stat").read_text().rpartition(")")[2].split()[1]
                )
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {root}
