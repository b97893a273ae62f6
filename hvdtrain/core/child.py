"""A process that does not outlive the one that starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_PROGRAM = [sys.executable, "-I", "-S", str(Path(__file__).with_name("ends_with_parent.py"))]


def start_child(
    command: Sequence[str],
    environ: Mapping[str, str],
    at_our_end: signal.Signals,
    *,
    new_session: bool = False,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Gets the signal `at_our_end` when this process ends, for whatever reason, and ends with 127 where the command cannot be started.

    output: for its standard output and error, in place of ours; it reads nothing then.
    """
    return subprocess.Popen(
        [*_PROGRAM, str(os.getpid()), str(int(at_our_end)), *command],
        env=environ,
        start_new_session=new_session,
        stdin=None if output is None else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
