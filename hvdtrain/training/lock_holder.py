"""The process that holds a run folder, as its lock file names it, and the errors when a job loses
its folder."""

from __future__ import annotations

import contextlib
import errno
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

from hvdtrain.core.folder import Folder
from hvdtrain.errors import UserError

LENGTH = 1024  # bytes of a lock file, always, so that it is rewritten in place on a full disk too


class Holder(NamedTuple):
    """The content of a lock file."""

    token: str  # unique to this lock
    host: str
    machine: str  # where the process number is valid
    pid: int
    # start of the process, in ticks of its machine: tells apart processes with the same number
    process_start: int
    since_s: float  # time of day, for people
    beats: int = 0  # grows while the process lives
    ending: bool = False  # the job writes its last checkpoint, or is about to do so

    def __str__(self) -> str:
        if not self.host:
            return "a process that its lock does not name"
        since = datetime.fromtimestamp(self.since_s).isoformat(" ", "seconds")
        return f"process {self.pid} on {self.host}, since {since}"


_KINDS = (str, str, str, int, int, float, int, bool)


def this_process() -> Holder:
    machine = _machine() or secrets.token_hex(8)
    return Holder(
        secrets.token_hex(8),
        socket.gethostname(),
        machine,
        os.getpid(),
        _process_start(os.getpid()) or 0,
        round(time.time(), 3),
    )


def to_bytes(holder: Holder) -> bytes:
    return json.dumps(holder._asdict()).encode().ljust(LENGTH - 1) + b"\n"


def from_bytes(data: bytes) -> Holder:
    """Returns the holder in a file. A truncated or foreign file gives a holder without a host,
    whose token changes with the file."""
    try:
        tree = json.loads(data)
        holder = Holder(
            *(kind(tree[name]) for name, kind in zip(Holder._fields, _KINDS, strict=True))
        )
        in_range = 0 < holder.pid < 2**31 and 0 <= holder.since_s < 1e11
        if re.fullmatch("[0-9a-f]{16}", holder.token) and holder.host.isprintable() and in_range:
            return holder
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        pass
    return Holder(hashlib.sha256(data).hexdigest()[:16], "", "", 0, 0, 0.0)


def is_gone(holder: Holder) -> bool | None:
    """Whether the process has ended; None if this process cannot see it, because it is on another
    host or in another container."""
    if not holder.host or holder.machine != _machine():
        return None
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it belongs to another user
        pass
    start = _process_start(holder.pid)
    return start is not None and start != holder.process_start


def _machine() -> str:
    """Returns a name shared by all processes that can see each other's process numbers; empty if
    unknown."""
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} "
            f"{os.stat('/proc/self/ns/pid').st_ino}"
        )
    except OSError:
        return ""


def _process_start(pid: int) -> int | None:
    """Returns the start of a process in ticks since boot; -1 if it has ended, None if it cannot be
    read."""
    try:
        state, *rest = (
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        )
    except (OSError, ValueError):
        return None
    return -1 if state in "ZX" else int(rest[18])


# of a folder, or of a file that is created if it is absent
GONE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ESTALE,
    errno.ELOOP,
)
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_AGAIN = "the same command resumes from there"


def lost_folder(run: Path, folder: Folder, holder: Holder | None = None) -> UserError:
    """Returns the error for a folder that no longer has the job's lock under its path. holder: of
    the lock that is there now."""
    newest = _newest_checkpoint(folder)
    lost = (
        f"the steps after the checkpoint of step {newest} are lost"
        if newest is not None
        else "it has no checkpoint: all steps are lost"
    )
    path = folder.path_now()
    if path is None:
        what = (
            f"the run folder {run} was deleted while the job ran: its checkpoints and its events "
            "are lost"
        )
        return UserError(what, str(run), "start the job again, with a folder that nothing deletes")
    if not _is_at(run, folder):
        what = f"the run folder {run} was renamed to {path} while the job ran; {lost}"
        return UserError(what, str(path), f"move it back, or give run={path}: {_AGAIN}")
    what = (
        f"another job has taken the run folder {run}: {holder}"
        if holder
        else f"the lock of the run folder {run} was removed, or the folder is being deleted"
    )
    return UserError(f"{what}; {lost}", str(run), f"let one job run at a time; {_AGAIN}")


def unwritable_folder(run: Path, error: OSError) -> UserError:
    """Returns the error for a folder that has become unwritable."""
    with contextlib.suppress(OSError), Folder.open(run) as folder:
        newest = _newest_checkpoint(folder)
        lost = (
            f"the steps after the checkpoint of step {newest} are lost"
            if newest is not None
            else "all steps are lost"
        )
        what = f"the run folder {run} can no longer be written ({error.strerror}); {lost}"
        return UserError(what, str(run), f"make it writable; {_AGAIN}")
    return UserError(
        f"the run folder {run} can no longer be used ({error.strerror})",
        str(run),
        f"make it writable; {_AGAIN}",
    )


def _is_at(run: Path, folder: Folder) -> bool:
    with contextlib.suppress(OSError):
        return folder.is_at(run)
    return False


def _newest_checkpoint(folder: Folder) -> int | None:
    """Returns the step of the newest checkpoint."""
    with contextlib.suppress(OSError), folder.folder("checkpoints") as checkpoints:
        steps = [
            name.removeprefix("step-") for name in checkpoints.names() if name.startswith("step-")
        ]
        return max((int(step) for step in steps if step.isdecimal()), default=None)
    return None
