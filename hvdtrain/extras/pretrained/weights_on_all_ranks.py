"""Files of pretrained weights that every rank opens itself: whether all ranks see the same ones,
and their arrays by ranges."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.arrays import ArrayInFile
from hvdtrain.core.folder import check_regular
from hvdtrain.errors import UserError, first_line
from hvdtrain.frameworks.learner import Learner
from hvdtrain.training.checkpoint.array_file import PIECE_BYTES
from hvdtrain.training.checkpoint.files import PARSE_ERRORS
from hvdtrain.training.checkpoint.load import OwnElements
from hvdtrain.training.checkpoint.ranges import arrays_of
from hvdtrain.training.replicas.broadcast import common_digest

_MEET_BYTES = 2**26  # of a file that is hashed between two meetings: a second of a slow disk
_OTHER = "a file on a file system that all hosts share, or the same copy on each"


class WrongWeights(UserError):
    """The numbers of a weights file cannot be read, or the model cannot take them."""


class WeightPlace(NamedTuple):
    """An array of a file in the safetensors format."""

    path: Path  # absolute
    name: str  # in the file


class _FileStatus(NamedTuple):
    """A file on a shared file system has the same status on all hosts; a copy of it does not."""

    size: int  # bytes
    modified_ns: int
    inode: int


class _Seen(NamedTuple):
    """How a rank sees the files."""

    host: str
    problem: str  # why it cannot open them; empty if it can
    files: list[_FileStatus]


def why_one_rank_reads(
    communicator: Communicator,
    places: Mapping[str, WeightPlace],
    where: str,
    go_on: Callable[[], None],
) -> str:
    """Names a rank that cannot open the files; empty if every rank can read its own elements. A
    collective.

    places: of the arrays that lie in files. Copies are compared by their digests; one rank reads
    each. Raises UserError on all ranks if they differ. go_on: called as reading progresses.
    """
    if not places:
        return "none of them is a plain array of a safetensors file"
    paths = list(dict.fromkeys(place.path for place in places.values()))
    problem, statuses = _look(paths)
    seen: list[_Seen] = communicator.allgather_object(
        _Seen(socket.gethostname(), problem, statuses)
    )
    if line := _first_problem(seen):
        return line
    first_rank: dict[tuple[_FileStatus, ...], int] = {}
    for rank, each in enumerate(seen):
        first_rank.setdefault(tuple(each.files), rank)
    readers = list(first_rank.values())
    if len(readers) == 1:
        return ""
    sizes = [max(file.size for file in files) for files in zip(*first_rank, strict=True)]
    own = _digests(communicator, paths, sizes, communicator.rank in readers, go_on)
    found: list[tuple[str, list[str]]] = communicator.allgather_object(own)
    read = [each._replace(problem=why) for each, (why, _) in zip(seen, found, strict=True)]
    if line := _first_problem(read):
        return line
    for rank in readers[1:]:
        for path, first, other in zip(paths, found[0][1], found[rank][1], strict=True):
            if first != other:
                what = (
                    f"{path} differs between ranks: its digest is {first} on {seen[0].host}, where "
                    f"rank 0 reads it, but {other} on {seen[rank].host}, where rank {rank} does"
                )
                raise UserError(what, where, _OTHER)
    return ""


def _look(paths: Sequence[Path]) -> tuple[str, list[_FileStatus]]:
    """Why this rank cannot open the files, and their status."""
    found = []
    for path in paths:
        try:
            check_regular(path)
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
        except OSError as error:
            return _cannot_read(path, error), []
        found.append(_FileStatus(status.st_size, status.st_mtime_ns, status.st_ino))
    return "", found


def _cannot_read(path: Path, error: OSError) -> str:
    return f"cannot read {path}: {error.strerror or error}"


def _first_problem(seen: Sequence[_Seen]) -> str:
    return next(
        (f"rank {rank} on {of.host} {of.problem}" for rank, of in enumerate(seen) if of.problem), ""
    )


def _digests(
    communicator: Communicator,
    paths: Sequence[Path],
    sizes: Sequence[int],
    reads: bool,
    go_on: Callable[[], None],
) -> tuple[str, list[str]]:
    """Why this rank cannot read the files, and digests of their contents, 128 bits each as 32 hex
    digits. A collective, in which only ranks with `reads` read.

    sizes: the largest of any rank, in bytes.
    """
    problem = ""
    digests = []
    for path, size in zip(paths, sizes, strict=True):
        pieces: Iterator[bytes] = _pieces(path) if reads else iter(())
        hashed = xxhash.xxh3_128()
        for _ in range(0, size + 1, _MEET_BYTES):
            try:
                hashed.update(next(pieces, b""))
            except OSError as error:
                problem = problem or _cannot_read(path, error)
            communicator.allreduce(np.zeros(1, np.int64), "weights.meet")
            go_on()
        digests.append(hashed.hexdigest())
    return problem, digests


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_MEET_BYTES):
            yield piece


def load_own_elements(
    communicator: Communicator,
    learner: Learner,
    places: Mapping[str, WeightPlace],
    where: str,
    check: Callable[[str, np.ndarray], None],
    go_on: Callable[[], None],
) -> str:
    """Reads on each rank its elements of the arrays; returns the digest of the state. A
    collective.

    check: raises WrongWeights for wrong numbers of an array. Raises on all ranks what it raises on
    one, and WrongWeights if a rank cannot read.
    """

    def checked(own: str, array: ArrayInFile) -> ArrayInFile:
        def read(runs: Iterable[tuple[int, int]]) -> np.ndarray:
            numbers = array.read(runs)
            check(own, numbers)
            return numbers

        return array._replace(read=read)

    @contextlib.contextmanager
    def open_file() -> Iterator[dict[str, ArrayInFile]]:
        with _open_weights(communicator.rank, places, where) as arrays:
            yield {own: checked(own, array) for own, array in arrays.items()}

    elements = OwnElements(communicator, learner, go_on, failure=WrongWeights)
    if failures := elements.load(open_file, is_partial=True):
        raise failures[0]
    return common_digest(communicator, learner)


@contextlib.contextmanager
def _open_weights(
    rank: int, places: Mapping[str, WeightPlace], where: str
) -> Iterator[dict[str, ArrayInFile]]:
    """Inside, this rank can read these arrays. Raises WrongWeights, and so does reading one."""
    with ExitStack() as stack:
        arrays: dict[Path, dict[str, ArrayInFile]] = {}
        for path in dict.fromkeys(place.path for place in places.values()):
            naming = _Naming(rank, path, where)
            with naming():
                file: BufferedReader = stack.enter_context(path.open("rb"))
                arrays[path] = arrays_of(_UnverifiedFile(file), naming)
        yield {own: arrays[place.path][place.name] for own, place in places.items()}


class _UnverifiedFile:
    """A file without checksums. Only the requested bytes are read."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file

    def read(self, begin: int, end: int) -> Iterator[memoryview]:
        while begin < end:
            piece = os.pread(self._file.fileno(), min(end - begin, PIECE_BYTES), begin)
            if not piece:
                raise ValueError(f"it ends before byte {end}")
            yield memoryview(piece)
            begin += len(piece)


class _Naming:
    """Names rank, host and file of an error while reading."""

    def __init__(self, rank: int, path: Path, where: str) -> None:
        self._rank = rank
        self._path = path
        self._where = where

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        try:
            yield
        except (OSError, *PARSE_ERRORS) as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or first_line(error)
            what = f"rank {self._rank} on {socket.gethostname()} cannot read {self._path}: {reason}"
            raise WrongWeights(what, self._where, _OTHER) from None
