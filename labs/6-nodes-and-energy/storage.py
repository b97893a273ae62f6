"""A storage whose rate is limited for all ranks of a machine together."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

# no reader has taken anything
NOTHING_TAKEN = struct.pack("d", 0.0)


class Storage:
    """A file that all ranks of this machine read, at most so many bytes a second in all.

    limit: a file with the time until which the storage is busy, of the machine's monotonic clock. A
    reader takes the next free interval, under a lock, and waits for its end: so the readers queue,
    as at a disk or at a network link."""

    def __init__(self, data: Path, limit: Path, rate: float) -> None:
        self._data = os.open(data, os.O_RDONLY)
        self._size = data.stat().st_size
        self._limit = os.open(limit, os.O_RDWR)
        self._rate = rate

    def read(self, size: int, offset: int) -> bytes:
        until_s = self._take(size)
        content = os.pread(self._data, size, offset % (self._size - size))
        time.sleep(max(0.0, until_s - time.monotonic()))
        return content

    def _take(self, size: int) -> float:
        """When this reader has its bytes."""
        fcntl.flock(self._limit, fcntl.LOCK_EX)
        try:
            (busy_s,) = struct.unpack("d", os.pread(self._limit, 8, 0))
            until_s = max(busy_s, time.monotonic()) + size / self._rate
            os.pwrite(self._limit, struct.pack("d", until_s), 0)
        finally:
            fcntl.flock(self._limit, fcntl.LOCK_UN)
        return until_s
