"""A file to which every rank writes its bytes, even from several hosts. Only rank 0 writes a block
that two ranks share.

An NFS client may write the whole page around a changed byte, with the other bytes as it last read
them. So two hosts that write to one page undo each other's bytes.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader, BufferedWriter, FileIO

from hvdtrain.training.checkpoint.array_file import PIECE_BYTES
from hvdtrain.training.checkpoint.sums import ByteSum

BLOCK_BYTES = 2**16  # the largest page of a system that Linux runs on
# bytes after which a rank waits for the disk, so that its progress is visible while it writes
SYNC_BYTES = 2**28
_APART = struct.Struct(
    "<QQQ"
)  # before bytes that are apart: the number of their file, the place of the first in it, how many they are  # noqa: E501


class WholeBlocks:
    """The blocks of a file that one rank's stretches cover completely; the last block ends with the
    file."""

    def __init__(self, stretches: Iterable[tuple[int, int]], size: int) -> None:
        """stretches: (first byte, last byte + 1), in any order; size: of the file, in bytes."""
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in _joined(stretches):
            first = -(-begin // BLOCK_BYTES) * BLOCK_BYTES
            behind = end if end == size else end // BLOCK_BYTES * BLOCK_BYTES
            if first < behind:
                self._begins.append(first)
                self._ends.append(behind)

    def split(self, begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Splits a stretch, or a piece of one, into parts: (first byte, last byte + 1, whether it
        lies in these blocks)."""
        # index of the only run of whole blocks that may lie in it
        place = bisect_right(self._ends, begin)
        first = behind = end
        if place < len(self._ends):
            first = min(max(begin, self._begins[place]), end)
            behind = min(self._ends[place], end)
        for start, stop, is_whole in (
            (begin, first, False),
            (first, behind, True),
            (behind, end, False),
        ):
            if start < stop:
                yield start, stop, is_whole


def _joined(stretches: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorts stretches and merges those that touch."""
    start = stop = 0
    for begin, end in sorted(stretches):
        if begin != stop:
            if start < stop:
                yield start, stop
            start = begin
        stop = end
    if start < stop:
        yield start, stop


class PartWriter:
    """Writes one rank's bytes into a file. Bytes outside of its whole blocks go to `apart`, for
    join()."""

    def __init__(
        self,
        file: FileIO,
        blocks: WholeBlocks | None = None,
        apart: BufferedWriter | None = None,
        number: int = 0,
        on_disk: Callable[[], None] = lambda: None,
    ) -> None:
        """number: the file's index in join(); on_disk: called whenever SYNC_BYTES more are on
        disk."""
        self._file = file
        self._blocks = blocks
        self._apart = apart
        self._number = number
        self._on_disk = on_disk
        self._unsynced_bytes = 0
        self.sum = ByteSum()  # sum of the bytes in memory

    def write(self, begin: int, data: memoryview) -> None:
        """Raises OSError."""
        for done in range(0, len(data), PIECE_BYTES):
            piece = data[done : done + PIECE_BYTES]
            self.sum = self.sum.with_bytes(begin + done, piece)
            self._write(begin + done, piece)
            self._unsynced_bytes += len(piece)
            if self._unsynced_bytes >= SYNC_BYTES:
                self.sync()
                self._on_disk()

    def _write(self, begin: int, data: memoryview) -> None:
        if self._blocks is None or self._apart is None:
            _write_at(self._file, begin, data)
            return
        for start, stop, is_whole in self._blocks.split(begin, begin + len(data)):
            part = data[start - begin : stop - begin]
            if is_whole:
                _write_at(self._file, start, part)
            else:
                self._apart.write(_APART.pack(self._number, start, len(part)))
                self._apart.write(part)

    def sync(self) -> None:
        """Waits until everything is on disk."""
        os.fsync(self._file.fileno())
        if self._apart is not None:
            self._apart.flush()
            os.fsync(self._apart.fileno())
        self._unsynced_bytes = 0


def join(files: Sequence[FileIO], apart: BufferedReader) -> None:
    """Writes the bytes that PartWriters put apart into the files. Raises OSError if they are
    truncated."""
    while head := apart.read(_APART.size):
        number, begin, length = _APART.unpack(head)
        data = apart.read(length)
        if len(data) < length:
            raise OSError(None, "the file that a rank left for rank 0 is truncated")
        _write_at(files[number], begin, memoryview(data))
    for file in files:
        os.fsync(file.fileno())


def _write_at(file: FileIO, begin: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(file.fileno(), data, begin)
        data = data[written:]
        begin = begin + written
