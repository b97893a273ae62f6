"""A file lock: one process of the machine at a time prepares a folder, the others wait."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SILENT_S = 2.0


@contextmanager
def locked(folder: Path, work: str) -> Iterator[None]:
    """Holds the lock of `folder`, which is made if absent. A process that waits 2 s prints once that another one does `work`.

    The system releases the lock of a process that ends, also of one that is killed. Raises OSError.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".hvdtrain.lock")
    try:
        lock.acquire(timeout=_SILENT_S)
    except Timeout:
        print(f"waiting for another process on this machine: it {work}", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
