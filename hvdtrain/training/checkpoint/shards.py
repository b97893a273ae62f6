"""A checkpoint of which every rank writes its own byte ranges: the bytes of its files are the same for any number of ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core.folder import Folder
from hvdtrain.core.pieces import Piece
from hvdtrain.errors import Diverged
from hvdtrain.training.checkpoint.array_file import in_order, make_header, to_bytes
from hvdtrain.training.checkpoint.shared_file import PartWriter, Range, WholeBlocks, join, read_back

WAIT_S = 300.0  # of rank 0 for a rank that writes nothing meanwhile; of the others for the folder
LOOK_S = 0.05
PROGRESS_S = 10.0  # between two looks at what a rank has written so far
_REPORT_BYTES = 2**30  # of a rank: 120 for each stretch, and of columns each row of a matrix is one


class Layout:
    """Where the numbers of each array lie: known to every rank from the names, shapes and dtypes alone."""

    def __init__(self, pieces: Sequence[Piece], files: Sequence[str], file_of: Callable[[str], str]) -> None:
        self.headers: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}  # of the files, in bytes
        self._begins: dict[str, int] = {}
        self._file_of = file_of
        self.names = [piece.name for piece in pieces]
        for file in files:
            ordered = in_order({p.name: np.broadcast_to(np.empty((), p.array.dtype), p.shape) for p in pieces if file_of(p.name) == file})
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

    def places(self, piece: Piece) -> Iterator[tuple[int, memoryview]]:
        """Where the bytes of each stretch of a piece begin in its file, and the bytes."""
        data, size, done = to_bytes(piece.array), piece.array.itemsize, 0
        for first, behind in piece.runs():
            length = (behind - first) * size
            yield self._begins[piece.name] + first * size, data[done : done + length]
            done += length


class Parts:
    """What one rank writes of a checkpoint: a host copy of its own pieces."""

    def __init__(
        self, pieces: Sequence[Piece], files: Sequence[str], file_of: Callable[[str], str], rank: int, *, several_hosts: bool = False
    ) -> None:
        """several_hosts: this rank writes whole blocks alone, and rank 0 what is left of them."""
        self.rank, self.several_hosts = rank, several_hosts
        self.layout = Layout(pieces, files, file_of)
        self._own = [piece._replace(array=piece.array.copy()) for piece in pieces if piece.is_mine or (piece.is_whole and rank == 0)]

    def check_finite(self) -> None:
        """Raises Diverged where a weight or optimizer state is not finite."""
        for piece in self._own:
            if not piece.name.startswith("b.") and piece.array.dtype.kind == "f" and not np.isfinite(piece.array).all():
                raise Diverged(f"{piece.name} is not finite", "checkpoint", "a lower optim.base_lr; the checkpoint before is good")

    def write(self, folder: Folder, on_disk: Callable[[], None] = lambda: None) -> list[Range]:
        """Writes them into the files of the folder, which have their sizes. Raises OSError. on_disk: as PartWriter's."""
        ranges = []
        with folder.create(_apart(self.rank)) if self.several_hosts and self.rank else contextlib.nullcontext() as apart:
            for file, size in self.layout.sizes.items():
                blocks = WholeBlocks(((begin, begin + len(data)) for begin, data in self._places(file)), size) if apart else None
                with folder.overwrite(file) as opened:
                    writer = PartWriter(opened, blocks, apart, on_disk)
                    ranges += [Range(file, begin, begin + len(data), writer.write(begin, data)) for begin, data in self._places(file)]
                    writer.sync()
        return ranges

    def _places(self, file: str) -> Iterator[tuple[int, memoryview]]:
        for piece in self._own:
            if self.layout.file(piece) == file:
                yield from self.layout.places(piece)


def write_parts(parts: Parts, run: Path, unfinished: str, is_over: Callable[[], bool]) -> None:
    """On a rank other than 0, in a thread: writes this rank's part of a checkpoint into the folder that rank 0 makes, and a report.

    is_over: whether nobody waits for it any more.
    """
    folder = _wait_for_folder(run, unfinished, is_over)
    if folder is None:
        return
    report: dict[str, Any]
    with folder:
        try:
            parts.check_finite()
            report = {"ranges": parts.write(folder, lambda: _tell_progress(folder, parts.rank))}
        except Diverged as error:
            report = {"diverged": error.what}
        except OSError as error:
            report = {"errno": error.errno, "failure": error.strerror or str(error)}
        try:
            folder.replace(_report(parts.rank), json.dumps(report).encode())
        except OSError:  # rank 0 gives up in time
            return


def _tell_progress(folder: Folder, rank: int) -> None:
    """One byte more, which a rank on another host sees when it opens the file."""
    with folder.append(_progress(rank)) as file:
        file.write(b".")


def _wait_for_folder(run: Path, unfinished: str, is_over: Callable[[], bool]) -> Folder | None:
    began_s = time.monotonic()
    while not is_over() and time.monotonic() - began_s < WAIT_S:
        try:
            return Folder.open(run, "checkpoints", unfinished)
        except FileNotFoundError:
            time.sleep(LOOK_S)
    return None


class WrittenByAll:
    """On rank 0: the arrays of a checkpoint as files.write() takes them."""

    def __init__(
        self,
        parts: Parts,
        ranks: Sequence[int],
        hosts: Sequence[str],
        unfinished: str,
        is_over: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ranks: the others, which write, too; is_over: whether some of them are lost."""
        self.unfinished = unfinished
        self.parts, self._ranks, self._hosts, self._is_over, self._clock = parts, ranks, hosts, is_over, clock
        self._moved: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        return self.parts.layout.nbytes

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts.layout.names)

    def prepare(self, folder: Folder) -> None:
        """Makes the files in their sizes, before the folder has the name that the others wait for."""
        for file, header in self.parts.layout.headers.items():
            with folder.create(file) as opened:
                opened.write(header)
                opened.truncate(self.parts.layout.sizes[file])

    def fill(self, folder: Folder, moved: Callable[[], None] = lambda: None) -> dict[str, str]:
        """Returns once all ranks have written and it is all on the disk: the SHA-256 of each file, by the bytes that were in memory.

        moved: called as long as a rank writes, or rank 0 reads what was written. Raises OSError where a rank cannot write or writes
        nothing for WAIT_S, Diverged where it has a number that is not finite.
        """
        self._moved = moved
        self.parts.check_finite()
        ranges = self.parts.write(folder, moved)
        for rank in self._ranks:
            of_rank = self._wait_for(folder, rank)
            if self.parts.several_hosts:
                self._join(folder, rank, of_rank)
            ranges += of_rank
        checksums = {file: self._checked(folder, file, [of for of in ranges if of.file == file]) for file in self.parts.layout.sizes}
        for rank in self._ranks:
            for name in (_report(rank), _apart(rank), _progress(rank)):
                with contextlib.suppress(FileNotFoundError):
                    folder.remove(name)
        return checksums

    def _join(self, folder: Folder, rank: int, ranges: list[Range]) -> None:
        """Writes the bytes that a rank has left to rank 0: of blocks that are not wholly its own."""
        with folder.open_file(_apart(rank)) as apart:
            for file, size in self.parts.layout.sizes.items():
                stretches = [(of.begin, of.end) for of in ranges if of.file == file]
                with folder.overwrite(file) as opened:
                    join(opened, WholeBlocks(stretches, size), stretches, apart)

    def _wait_for(self, folder: Folder, rank: int) -> list[Range]:
        moved_s = looked_s = self._clock()
        progress = 0
        while True:
            try:
                report = json.loads(folder.read(_report(rank), _REPORT_BYTES))
                break
            except FileNotFoundError:
                if self._is_over():
                    raise OSError(None, "ranks are lost while each writes its part") from None
            now_s = self._clock()
            if now_s - looked_s > min(PROGRESS_S, WAIT_S / 2):
                before, progress, looked_s = progress, _read_progress(folder, rank), now_s
                if progress > before:
                    moved_s = now_s
                    self._moved()
            if now_s - moved_s > WAIT_S:
                raise OSError(None, f"rank {rank} on {self._hosts[rank]} has written nothing of its part for {WAIT_S:.0f} s")
            time.sleep(LOOK_S)
        self._moved()
        if "diverged" in report:
            raise Diverged(report["diverged"], "checkpoint", "a lower optim.base_lr; the checkpoint before is good")
        if "failure" in report:
            raise OSError(report["errno"], f"{report['failure']} (rank {rank} on {self._hosts[rank]})")
        return [Range(*each) for each in report["ranges"]]

    def _checked(self, folder: Folder, file: str, ranges: list[Range]) -> str:
        """The SHA-256 of a file. Raises OSError where a range is not what its rank had in memory, or nobody wrote it."""
        header = self.parts.layout.headers[file]
        of_header = Range(file, 0, len(header), hashlib.sha256(header).hexdigest())
        with folder.open_file(file) as opened:
            return read_back(opened, self.parts.layout.sizes[file], [of_header, *sorted(ranges)], self._moved)


def _report(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _apart(rank: int) -> str:
    return f"rank-{rank:05d}.apart"


def _progress(rank: int) -> str:
    return f"rank-{rank:05d}.progress"


def _read_progress(folder: Folder, rank: int) -> int:
    """How often a rank has told of its progress."""
    try:
        return len(folder.read(_progress(rank), _REPORT_BYTES))
    except FileNotFoundError:
        return 0
