"""A file lock: one process of the machine at a time prepares a folder, the others wait."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.errors import UserError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what flock() answers on a file system that is mounted without them
_SILENT_S = 2.0
_FIX = "a folder on a local disk by data.cache=, data.stage= or $XDG_CACHE_HOME; or mount it with locks (NFS: lockd, Lustre: -o flock)"


@contextmanager
def locked(folder: Path, work: str) -> Iterator[None]:
    """Holds the lock of `folder`, which is made if absent. A process that waits 2 s prints once that another one does `work`.

    The system releases the lock of a process that ends, also of one that is killed. Raises UserError where the file system has no locks,
    and OSError.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".hvdtrain.lock")
    try:
        lock.acquire(timeout=_SILENT_S)
    except Timeout:
        print(f"waiting for another process on this machine: it {work}", file=sys.stderr, flush=True)
        lock.acquire()
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise UserError(f"the file system of {folder} has no locks: {error.strerror}", str(folder), _FIX) from None
        raise
    try:
        yield
    finally:
        lock.release()
