"""Processes that a lab starts: after Ctrl-C, which they get too, they have time to end by themselves; none outlives the lab."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

from hvdtrain.cli.launch.child import start_child

PATIENCE_S = 20.0  # a job writes a checkpoint first
KILL_S = 3.0  # from SIGTERM to SIGKILL
Process = subprocess.Popen[bytes]


def start(command: Sequence[str], output: IO[bytes] | None = None, environ: Mapping[str, str] | None = None) -> Process:
    """output: for its standard output and error, in place of ours."""
    return start_child(command, os.environ if environ is None else environ, signal.SIGTERM, output=output)


def wait(processes: Sequence[Process], patience_s: float = PATIENCE_S) -> list[int]:
    """Their exit codes, 128 + N where signal N ended one. Raises KeyboardInterrupt after Ctrl-C, once all have ended."""
    try:
        codes = [process.wait() for process in processes]
    except KeyboardInterrupt:
        for process in _running(processes, patience_s):
            process.terminate()
        for process in _running(processes, KILL_S):
            process.kill()
        raise
    return [code if code >= 0 else 128 - code for code in codes]


def _running(processes: Sequence[Process], most_s: float) -> list[Process]:
    """The processes that have not ended within so many seconds."""
    until_s = time.monotonic() + most_s
    while (running := [process for process in processes if process.poll() is None]) and time.monotonic() < until_s:
        time.sleep(0.02)
    return running
