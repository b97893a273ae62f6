"""A process that does not outlive the one that starts it."""

from __future__ import annotations

import ctypes
import signal
import subprocess
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def start_child(
    command: Sequence[str], environ: Mapping[str, str], at_our_end: signal.Signals, *, new_session: bool = False
) -> subprocess.Popen[bytes]:
    """Gets the signal `at_our_end` when this process ends, for whatever reason. Call it before there are other threads."""
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        command,
        env=environ,
        start_new_session=new_session,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, at_our_end),  # noqa: PLW1509 (safe: one thread)
    )
