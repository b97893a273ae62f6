"""Runs a submission on its ranks, under a time limit; none of its processes outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

from hvdtrain.cli.launch.launcher_commands import LaunchRequest, mpirun_command
from hvdtrain.cli.launch.machine import available_cores, find_launcher

_PR_SET_CHILD_SUBREAPER = 36  # of <sys/prctl.h>: processes whose parent ends become children of this one
_POLL_S = 0.05
_LATE_S = 1.0  # between a job's end and the look at it, on a busy machine
_GRACE_S = 3.0  # between mpirun's SIGTERM and SIGKILL
_SHOWN_BYTES = 2000  # of the end of the output


class Ended(NamedTuple):
    """How a job ended."""

    how: Literal["by itself", "too slow", "hangs"]
    code: int  # exit code of mpirun; negative: the signal that ended it
    seconds: float  # from mpirun's start to its end, or to the limit
    output: str  # its end, of standard output and error


def run_job(script: Path, arguments: list[str], ranks: int, limit_s: float, silence_s: float, output: Path) -> Ended:
    """`mpirun -np RANKS python -m mpi4py SCRIPT ARGUMENTS` in the script's folder. Call it in a process that has no other children.

    With `-m mpi4py` an exception on one rank ends all; without it a rank that used mpi4py would wait for the others at its exit.
    silence_s: a job that has printed nothing for so long hangs. output: a file for what it prints. Raises UserError without an mpirun.
    """
    launcher = find_launcher("")
    program = (sys.executable, "-m", "mpi4py", script.name, *arguments)
    request = LaunchRequest(launcher.path, ranks, program, as_root=os.geteuid() == 0, oversubscribe=True)
    temporary = output.parent / "tmp"
    temporary.mkdir()
    threads = str(max(1, available_cores() // ranks))
    environ = {"OMP_NUM_THREADS": threads, "OMPI_MCA_mpi_yield_when_idle": "1", **os.environ}
    environ |= {"PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary)}
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    start = time.monotonic()
    with output.open("wb") as file:
        job = subprocess.Popen(
            mpirun_command(launcher.kind, request),
            cwd=script.parent,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        how = _watch(job, output, start + limit_s, silence_s)
        seconds = time.monotonic() - start
    finally:
        _end(job)
    return Ended(how, job.returncode, seconds, _tail(output))


def _watch(job: subprocess.Popen[bytes], output: Path, end_s: float, silence_s: float) -> Literal["by itself", "too slow", "hangs"]:
    """Until the job has ended, or has to be ended. end_s: of time.monotonic()."""
    printed, printed_s = 0, time.monotonic()
    while job.poll() is None:
        now = time.monotonic()
        if output.stat().st_size != printed:
            printed, printed_s = output.stat().st_size, now
        if now > end_s:
            return "too slow"
        if now - printed_s > silence_s:
            return "hangs"
        time.sleep(_POLL_S)
    return "too slow" if time.monotonic() > end_s + _LATE_S else "by itself"  # of a job that stopped this process meanwhile


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
                parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {root}


def _tail(output: Path) -> str:
    data = output.read_bytes()[-_SHOWN_BYTES:] if output.stat().st_size < 2**26 else b"(more than 64 MB)"
    return data.decode(errors="replace").strip()
