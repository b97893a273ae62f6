"""Gloo's threads: what they must have done before the interpreter ends."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

THREAD_NAME = "pt_gloo_runloop"  # as torch calls the threads that carry out Gloo's collectives; torch 2.9 gives them no name


def wait_until_idle(timeout_s: float) -> None:
    """Returns when no thread of Gloo has anything to do, or after `timeout_s`.

    torch ends these threads with the last reference to their process group, which a model (FSDP2's) or a traceback can keep. A thread
    that lets go of a tensor needs the interpreter's lock; in an interpreter that is ending it gets none, and the whole process is
    aborted (signal 6).

    A thread is idle when it sleeps and has not been switched in between two looks: one that waits for the interpreter's lock wakes
    every sys.getswitchinterval() to ask again. Where the system has no /proc (macOS) there is one look's pause only.
    """
    ends = time.monotonic() + timeout_s
    look_s = 4 * max(sys.getswitchinterval(), 0.005)
    before = _threads()
    while before and time.monotonic() < ends:
        time.sleep(look_s)  # without the interpreter's lock, so that who waits for it gets it
        now = _threads()
        if now == before and all(state == "S" for state, *_ in now.values()):
            return
        before = now
    if not Path("/proc/self/task").exists():
        time.sleep(look_s)


def _threads() -> dict[str, tuple[str, ...]]:
    """Thread id -> its state (S: sleeping, R: running or ready to run), and how often it was switched out, of Gloo's threads.

    Where none has Gloo's name, of all that Python has not started, but for those that wait for sockets.
    """
    found, unnamed = dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]]()
    of_python = {str(thread.native_id) for thread in threading.enumerate()}
    for task in Path("/proc/self/task").glob("*"):
        try:
            lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            waits_in = (task / "wchan").read_text()  # a function of the kernel, "0" for none
        except OSError:  # a thread that has ended meanwhile
            continue
        state = lines["State"][0], lines["voluntary_ctxt_switches"], lines["nonvoluntary_ctxt_switches"]
        if lines["Name"] == THREAD_NAME:
            found[task.name] = state
        elif task.name not in of_python and "poll" not in waits_in:
            unnamed[task.name] = state
    return found or unnamed
