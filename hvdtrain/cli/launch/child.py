"""A process that does not outlive the one that starts it."""

from __future__ import annotations

import ctypes
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def start_child(
    command: Sequence[str],
    environ: Mapping[str, str],
    at_our_end: signal.Signals,
    *,
    new_session: bool = False,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Gets the signal `at_our_end` when this process ends, for whatever reason. Call it before there are other threads.

    output: for its standard output and error, in place of ours; it reads nothing then.
    """
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        command,
        env=environ,
        start_new_session=new_session,
        stdin=None if output is None else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, at_our_end),  # noqa: PLW1509 (safe: one thread)
    )
