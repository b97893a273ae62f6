"""A checkpoint into which every rank writes its own byte ranges: the bytes of its files are the
same for any number of ranks.

Ranks communicate by files in its folder, because the main threads are training:
1. Each rank writes its ranges, and a report with a ByteSum of the bytes in memory.
2. When rank 0 has all reports, it writes a signal file. Each rank then reads an equal share of the
   files' chunks, whoever wrote them, and reports their SHA-256 and a ByteSum of the bytes on disk.
3. Rank 0 compares the two sums of each file.

A report has the same few bytes on any number of ranks, plus the checksums of a share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import part_of
from hvdtrain.core.arrays import Piece
from hvdtrain.core.folder import Folder
from hvdtrain.errors import Diverged
from hvdtrain.training.checkpoint.array_file import in_order, make_header, to_bytes
from hvdtrain.training.checkpoint.shared_file import SYNC_BYTES, PartWriter, WholeBlocks, join
from hvdtrain.training.checkpoint.sums import CHUNK_BYTES, ByteSum, count_chunks, read_chunk

# how long rank 0 waits for a rank without progress, and the others for rank 0
WAIT_S = 300.0
CLOSING_S = 30.0  # how long a rank whose job ends waits for rank 0
LOOK_S = 0.05  # before the second check for a file; doubled each time
MOST_LOOK_S = 1.0
PROGRESS_S = 10.0  # between two checks of a rank's progress
TELL_S = 1.0  # between two reports of a rank's progress
_READERS = 16  # reports that rank 0 reads at a time: each takes a round trip to the disk's server
_REPORT_BYTES = 2**26  # limit for a rank's report: 67 bytes for each chunk of its share
WORD = "all-have-written"  # the file that rank 0 writes: how many ranks there are


class CheckpointLayout:
    """The position of each array in the files, which every rank computes from names, shapes and
    dtypes."""

    def __init__(
        self, pieces: Sequence[Piece], files: Sequence[str], file_of: Callable[[str], str]
    ) -> None:
        self.headers: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}  # sizes of the files, in bytes
        self._begins: dict[str, int] = {}
        self._file_of = file_of
        self.names = [piece.name for piece in pieces]
        for file in files:
            ordered = in_order(
                {
                    p.name: np.broadcast_to(np.empty((), p.dtype), p.shape)
                    for p in pieces
                    if file_of(p.name) == file
                }
            )
            self.headers[file] = make_header(ordered)
            end = len(self.headers[file])
            for name, array in ordered.items():
                self._begins[name], end = end, end + array.nbytes
            self.sizes[file] = end

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def file(self, piece: Piece) -> str:
        return self._file_of(piece.name)

    def offsets_and_bytes(self, piece: Piece) -> Iterator[tuple[int, memoryview]]:
        """Yields the offset in the file and the bytes of each stretch of a piece."""
        data = to_bytes(piece.read())
        size = piece.dtype.itemsize
        done = 0
        for first, behind in piece.runs():
            length = (behind - first) * size
            yield self._begins[piece.name] + first * size, data[done : done + length]
            done += length


class CheckpointShard:
    """One rank's part of a checkpoint: a host copy of its pieces."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        files: Sequence[str],
        file_of: Callable[[str], str],
        rank: int,
        *,
        several_hosts: bool = False,
    ) -> None:
        """several_hosts: this rank only writes whole blocks, and rank 0 writes the remaining
        bytes."""
        self.rank = rank
        self.several_hosts = several_hosts
        self.layout = CheckpointLayout(pieces, files, file_of)
        self._own = [
            piece.copied() for piece in pieces if piece.is_mine or (piece.is_whole and rank == 0)
        ]

    def check_finite(self) -> None:
        """Raises Diverged if a weight or optimizer state is not finite."""
        for piece in self._own:
            if (
                not piece.name.startswith("b.")
                and piece.dtype.kind == "f"
                and not np.isfinite(piece.read()).all()
            ):
                raise Diverged(
                    f"{piece.name} is not finite",
                    "checkpoint",
                    "a lower optim.base_lr; the checkpoint before is good",
                )

    def write(self, folder: Folder, on_disk: Callable[[], None] = lambda: None) -> list[ByteSum]:
        """Writes the pieces into the files of the folder, which already have their sizes; returns
        the ByteSum of each file. Raises OSError.

        on_disk: as PartWriter's.
        """
        sums = []
        with (
            folder.create(_apart(self.rank))
            if self.several_hosts and self.rank
            else contextlib.nullcontext() as apart
        ):
            for number, (file, size) in enumerate(self.layout.sizes.items()):
                blocks = (
                    WholeBlocks(
                        ((begin, begin + len(data)) for begin, data in self._places(file)), size
                    )
                    if apart
                    else None
                )
                with folder.overwrite(file) as opened:
                    writer = PartWriter(opened, blocks, apart, number, on_disk)
                    for begin, data in self._places(file):
                        writer.write(begin, data)
                    writer.sync()
                sums.append(writer.sum)
        return sums

    def release(self) -> None:
        """Frees the memory of the pieces."""
        self._own.clear()

    def _places(self, file: str) -> Iterator[tuple[int, memoryview]]:
        for piece in self._own:
            if self.layout.file(piece) == file:
                yield from self.layout.offsets_and_bytes(piece)


class ChunkShare:
    """The chunks that one rank reads back: an equal share of the chunks of all files."""

    def __init__(self, sizes: dict[str, int], rank: int, ranks: int) -> None:
        """sizes: of the files, in bytes."""
        counts = {file: count_chunks(size) for file, size in sizes.items()}
        own = part_of(sum(counts.values()), rank, ranks)
        first = 0
        self._chunks: list[tuple[str, int]] = []
        for file, count in counts.items():
            self._chunks += [
                (file, number)
                for number in range(max(own.start - first, 0), min(own.stop - first, count))
            ]
            first += count
        self.sums = {file: ByteSum() for file in sizes}
        self.checksums: list[str] = []  # SHA-256 of each chunk, in order

    def read(self, folder: Folder, moved: Callable[[], None]) -> ChunkShare:
        """Reads them; moved: called after the first, and whenever SYNC_BYTES more are read. Raises
        OSError."""
        with contextlib.ExitStack() as stack:
            opened = {file: stack.enter_context(folder.open_file(file)) for file in self.sums}
            for place, (file, number) in enumerate(self._chunks):
                data = read_chunk(opened[file], number)
                self.checksums.append(hashlib.sha256(data).hexdigest())
                self.sums[file] = self.sums[file].with_bytes(number * CHUNK_BYTES, memoryview(data))
                if place % (SYNC_BYTES // CHUNK_BYTES) == 0:
                    moved()
        return self


class Patience:
    """The progress of another rank that this rank waits for."""

    def __init__(
        self, folder: Folder, rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._clock = clock
        self._moved_s = self._looked_s = clock()
        self._progress = 0

    def look(self, wait_s: float) -> bool:
        """Whether the other rank has progressed since the last check. Raises TimeoutError if it has
        made no progress for wait_s."""
        now_s = self._clock()
        before = self._progress
        if now_s - self._looked_s > min(PROGRESS_S, wait_s / 2):
            self._progress = _read_progress(self._folder, self._rank)
            self._looked_s = now_s
            if self._progress > before:
                self._moved_s = now_s
        if now_s - self._moved_s > wait_s:
            raise TimeoutError
        return self._progress > before


def write_parts(
    parts: CheckpointShard,
    run: Path,
    unfinished: str,
    is_over: Callable[[], bool],
    is_lost: Callable[[], bool] = lambda: False,
) -> None:
    """On a rank other than 0, in a thread: writes this rank's part of a checkpoint into the folder
    that rank 0 creates, and reads back its share.

    is_over: whether a part that has not begun is no longer needed; is_lost: whether no rank waits
    for this one any longer.
    """
    folder = _wait_for_folder(run, unfinished, is_over)
    if folder is None:
        return
    with (
        folder,
        contextlib.suppress(OSError),
    ):  # the report cannot be written; rank 0 gives up after a timeout
        tell = Teller(folder, parts.rank)
        if not _report(
            folder, of_written(parts.rank), lambda: {"sums": _checked_write(parts, folder, tell)}
        ):
            return
        parts.release()
        ranks = _wait_for_word(folder, run, unfinished, is_over, is_lost)
        if ranks:
            _report(
                folder,
                of_read(parts.rank),
                lambda: _as_report(
                    ChunkShare(parts.layout.sizes, parts.rank, ranks).read(folder, tell)
                ),
            )


def _checked_write(
    parts: CheckpointShard, folder: Folder, tell: Callable[[], None]
) -> list[ByteSum]:
    parts.check_finite()
    return parts.write(folder, tell)


def _as_report(share: ChunkShare) -> dict[str, Any]:
    return {"sums": list(share.sums.values()), "checksums": share.checksums}


def _report(folder: Folder, name: str, work: Callable[[], dict[str, Any]]) -> bool:
    """Writes the result of the work, or why it failed, into the file `name`; returns whether it
    succeeded. Raises OSError if the file cannot be written."""
    try:
        report = work()
    except Diverged as error:
        report = {"diverged": error.what}
    except OSError as error:
        report = {"errno": error.errno, "failure": error.strerror or str(error)}
    folder.replace(name, json.dumps(report).encode())
    return "sums" in report


class Teller:
    """Publishes a rank's progress, at most once per interval."""

    def __init__(self, folder: Folder, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._told_s = -math.inf

    def __call__(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_S:
            _tell_progress(self._folder, self._rank)
            self._told_s = now_s


def _tell_progress(folder: Folder, rank: int) -> None:
    """Appends a byte to the progress file, which a rank on another host sees when it opens the
    file."""
    with folder.append(_progress(rank)) as file:
        file.write(b".")


def _looks() -> Iterator[None]:
    """Yields forever, once for each look at the files of other ranks, and sleeps in between."""
    seconds = LOOK_S
    while True:
        yield
        time.sleep(seconds)
        seconds = min(2 * seconds, MOST_LOOK_S)


def _wait_for_folder(run: Path, unfinished: str, is_over: Callable[[], bool]) -> Folder | None:
    began_s = time.monotonic()
    for _ in _looks():
        if is_over() or time.monotonic() - began_s > WAIT_S:
            break
        with contextlib.suppress(FileNotFoundError):
            return Folder.open(run, "checkpoints", unfinished)
    return None


def _wait_for_word(
    folder: Folder,
    run: Path,
    unfinished: str,
    is_over: Callable[[], bool],
    is_lost: Callable[[], bool],
) -> int:
    """Returns the number of ranks when all have written; 0 if no rank waits for this one, or if
    rank 0 has ended or given up."""
    patience = Patience(folder, rank=0)
    for _ in _looks():
        with contextlib.suppress(FileNotFoundError):
            return int(folder.read(WORD, _REPORT_BYTES))
        if is_lost():
            break
        try:
            Folder.open(run, "checkpoints", unfinished).close()
            patience.look(CLOSING_S if is_over() else WAIT_S)
        except (FileNotFoundError, TimeoutError):
            break
    return 0


class WrittenByAll:
    """On rank 0: the arrays of a checkpoint for files.write(), written by all ranks."""

    def __init__(
        self,
        parts: CheckpointShard,
        ranks: Sequence[int],
        hosts: Sequence[str],
        unfinished: str,
        is_over: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ranks: the other ranks, which write, too; is_over: whether some of them have died."""
        self.unfinished = unfinished
        self.parts = parts
        self._ranks = ranks
        self._hosts = hosts
        self._is_over = is_over
        self._clock = clock
        self._moved: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        return self.parts.layout.nbytes

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts.layout.names)

    def prepare(self, folder: Folder) -> None:
        """Creates the files in their final sizes, before the folder gets the name that other ranks
        wait for."""
        for file, header in self.parts.layout.headers.items():
            with folder.create(file) as opened:
                opened.write(header)
                opened.truncate(self.parts.layout.sizes[file])

    def fill(
        self, folder: Folder, moved: Callable[[], None] = lambda: None
    ) -> dict[str, list[str]]:
        """Waits until all ranks have written and read back everything; returns the SHA-256 of each
        chunk of each file.

        moved: called as long as a rank writes or reads. Raises OSError if a rank cannot, or makes
        no progress for WAIT_S, or if the files differ from the memory; Diverged if a number is not
        finite.
        """

        tell = Teller(folder, self.parts.rank)

        def move() -> None:
            tell()
            moved()

        self._moved = move
        with ThreadPoolExecutor(_READERS) as readers:
            in_memory = self._write(folder, readers)
            on_disk, checksums = self._read_back(folder, readers)
            self._compare(in_memory, on_disk)
            self._remove_reports(folder, readers)
        return checksums

    def _write(self, folder: Folder, readers: ThreadPoolExecutor) -> list[ByteSum]:
        """Returns the ByteSum of each file over the memory of all ranks; rank 0 writes the headers.

        Raises OSError if a byte belongs to no rank, or to two.
        """
        headers = [
            ByteSum().with_bytes(0, memoryview(header))
            for header in self.parts.layout.headers.values()
        ]
        sums = [headers, _checked_write(self.parts, folder, self._moved)]
        self.parts.release()
        sums += [_sums(report) for report in self._gather(folder, of_written, readers)]
        if self.parts.several_hosts:
            for rank in self._ranks:
                self._join(folder, rank)
                self._moved()
        total = _total(sums)
        for (file, size), of_file in zip(self.parts.layout.sizes.items(), total, strict=True):
            if not of_file.covers(size):
                raise OSError(
                    None, f"bytes of {file} were not written, or were written by several ranks"
                )
        return total

    def _join(self, folder: Folder, rank: int) -> None:
        """Writes the bytes that a rank left to rank 0, in blocks that the rank shares with other
        ranks."""
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context(folder.overwrite(file)) for file in self.parts.layout.sizes
            ]
            join(files, stack.enter_context(folder.open_file(_apart(rank))))

    def _read_back(
        self, folder: Folder, readers: ThreadPoolExecutor
    ) -> tuple[list[ByteSum], dict[str, list[str]]]:
        """Returns the ByteSum of each file over what all ranks read, and the SHA-256 of its
        chunks."""
        ranks = 1 + len(self._ranks)
        sizes = self.parts.layout.sizes
        folder.replace(WORD, str(ranks).encode())
        own = ChunkShare(sizes, self.parts.rank, ranks).read(folder, self._moved)
        reports = [_as_report(own), *self._gather(folder, of_read, readers)]
        every = iter([checksum for report in reports for checksum in report["checksums"]])
        return _total([_sums(report) for report in reports]), {
            file: [next(every) for _ in range(count_chunks(size))] for file, size in sizes.items()
        }

    def _compare(self, in_memory: list[ByteSum], on_disk: list[ByteSum]) -> None:
        """Raises OSError if a file differs from the memory of the ranks, or was not read
        completely."""
        for file, written, read in zip(self.parts.layout.sizes, in_memory, on_disk, strict=True):
            if written != read:
                raise OSError(None, f"bytes of {file} are not what was written")

    def _gather(
        self, folder: Folder, name_of: Callable[[int], str], readers: ThreadPoolExecutor
    ) -> list[dict[str, Any]]:
        """Collects the reports of the other ranks: lists the folder once at each look, and reads
        _READERS files at a time."""

        def read(rank: int) -> dict[str, Any] | None:
            with contextlib.suppress(FileNotFoundError):
                report: dict[str, Any] = json.loads(folder.read(name_of(rank), _REPORT_BYTES))
                return report
            return None

        found: dict[int, dict[str, Any]] = {}
        missing = list(self._ranks)
        patience = None
        for _ in _looks():
            there = set(folder.names())
            before = len(missing)
            # NFS may return an outdated list
            come = [rank for rank in missing if name_of(rank) in there] or missing[:1]
            for rank, report in zip(come, readers.map(read, come), strict=True):
                if report is not None:
                    found[rank] = self._checked(rank, report)
                    self._moved()
            missing = [rank for rank in missing if rank not in found]
            if not missing:
                break
            if len(missing) < before:
                patience = None
            else:
                patience = patience or Patience(folder, missing[0], self._clock)
                self._wait_for(missing[0], patience)
        return [found[rank] for rank in self._ranks]

    def _wait_for(self, rank: int, patience: Patience) -> None:
        """Waits for a rank. Raises OSError if it makes no progress."""
        if self._is_over():
            raise OSError(None, "a rank was lost while the ranks wrote their parts")
        try:
            if patience.look(WAIT_S):
                self._moved()
        except TimeoutError:
            what = (
                f"rank {rank} on {self._hosts[rank]} has made no progress with its part for "
                f"{WAIT_S:.0f} s"
            )
            raise OSError(None, what) from None

    def _checked(self, rank: int, report: dict[str, Any]) -> dict[str, Any]:
        if "diverged" in report:
            raise Diverged(
                report["diverged"],
                "checkpoint",
                "a lower optim.base_lr; the checkpoint before is good",
            )
        if "failure" in report:
            raise OSError(
                report["errno"], f"{report['failure']} (rank {rank} on {self._hosts[rank]})"
            )
        return report

    def _remove_reports(self, folder: Folder, readers: ThreadPoolExecutor) -> None:
        """Removes the reports, before the checkpoint gets its name."""

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                folder.remove(name)

        names = [
            name_of(rank)
            for rank in (0, *self._ranks)
            for name_of in (of_written, of_read, _apart, _progress)
        ]
        for _ in readers.map(remove, [*names, WORD]):
            pass


def _sums(report: dict[str, Any]) -> list[ByteSum]:
    return [ByteSum(*each) for each in report["sums"]]


def _total(sums: Sequence[Sequence[ByteSum]]) -> list[ByteSum]:
    """Returns the sum of each file, over all ranks."""
    total = list(sums[0])
    for of_rank in sums[1:]:
        total = [one.plus(other) for one, other in zip(total, of_rank, strict=True)]
    return total


def of_written(rank: int) -> str:
    return f"rank-{rank:05d}.written"


def of_read(rank: int) -> str:
    return f"rank-{rank:05d}.read"


def _apart(rank: int) -> str:
    return f"rank-{rank:05d}.apart"


def _progress(rank: int) -> str:
    return f"rank-{rank:05d}.progress"


def _read_progress(folder: Folder, rank: int) -> int:
    """Returns how often a rank has published its progress."""
    try:
        return len(folder.read(_progress(rank), _REPORT_BYTES))
    except FileNotFoundError:
        return 0
