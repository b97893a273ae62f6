"""Who has a run folder: the process that a lock file names, and whether that process is still there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

LENGTH = 1024  # bytes of a lock file, always, so that it is rewritten in place on a full disk too


class Holder(NamedTuple):
    """What a lock file says."""

    token: str  # of this lock: no other has it
    host: str
    machine: str  # where the process number means something
    pid: int
    process_start: int  # of the process, in ticks of its machine: another process of the same number has another
    since_s: float  # time of day, for people
    beats: int = 0  # grows as long as the process lives
    ending: bool = False  # the job writes its last checkpoint, or is about to

    def __str__(self) -> str:
        if not self.host:
            return "a process that its lock does not name"
        since = datetime.fromtimestamp(self.since_s).isoformat(" ", "seconds")
        return f"process {self.pid} on {self.host}, since {since}"


_KINDS = (str, str, str, int, int, float, int, bool)


def this_process() -> Holder:
    machine = _machine() or secrets.token_hex(8)
    return Holder(secrets.token_hex(8), socket.gethostname(), machine, os.getpid(), _process_start(os.getpid()) or 0, round(time.time(), 3))


def to_bytes(holder: Holder) -> bytes:
    return json.dumps(holder._asdict()).encode().ljust(LENGTH - 1) + b"\n"


def from_bytes(data: bytes) -> Holder:
    """The holder in a file; of one that is cut off or foreign a holder without a host, whose token changes with the file."""
    try:
        tree = json.loads(data)
        holder = Holder(*(kind(tree[name]) for name, kind in zip(Holder._fields, _KINDS, strict=True)))
        in_range = 0 < holder.pid < 2**31 and 0 <= holder.since_s < 1e11
        if re.fullmatch("[0-9a-f]{16}", holder.token) and holder.host.isprintable() and in_range:
            return holder
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        pass
    return Holder(hashlib.sha256(data).hexdigest()[:16], "", "", 0, 0, 0.0)


def is_gone(holder: Holder) -> bool | None:
    """Whether the process has ended; None where this process cannot see it: it is on another host, or in another container."""
    if not holder.host or holder.machine != _machine():
        return None
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's
        pass
    start = _process_start(holder.pid)
    return start is not None and start != holder.process_start


def _machine() -> str:
    """A name that is equal for all processes that see each other by number; empty where that is not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _process_start(pid: int) -> int | None:
    """Ticks from the start of the machine to that of the process, -1 of one that has ended; None where that cannot be read."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return -1 if state in "ZX" else int(rest[18])
