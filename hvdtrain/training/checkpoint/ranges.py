"""Arrays of safetensors files, of which a rank reads only the elements that it has: those of a
checkpoint that several ranks wrote, whose chunks it compares with their checksums."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from hvdtrain.core.arrays import ArrayInFile
from hvdtrain.core.folder import Folder
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.array_file import (
    PREFIX_BYTES,
    ArrayPlace,
    from_bfloat16,
    places_of,
)
from hvdtrain.training.checkpoint.sums import ChunkedFile, sums_of

Naming = Callable[[], AbstractContextManager[None]]  # inside, errors get the name of the file


class BytesOfFile(Protocol):
    """An open file that is read in ranges."""

    def read(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yields bytes begin ... end - 1 in pieces. Raises OSError or ValueError if it cannot."""


class CheckpointInParts(NamedTuple):
    """A checkpoint that several ranks wrote, so that each may read its own elements."""

    folder: Path
    digest: str  # SHA-256 of its SHA256SUMS
    shapes: dict[str, tuple[int, ...]]  # of its arrays


def find_parts(folder: Path, limit_bytes: int) -> CheckpointInParts | None:
    """Reads the small files of a checkpoint and the headers of its array files; None if one rank
    wrote it. Raises Damaged."""
    with files.naming(folder, files.CHECKSUMS), files.open_checkpoint(folder) as opened:
        text = files.read_checksums(opened)
        checksums = files.parse_checksums(text)
    if any(sums_of(file) not in checksums for file in files.ARRAYS):
        return None  # a file has a single checksum, which cannot verify a part of it
    with open_arrays(folder, limit_bytes) as arrays:
        shapes = {name: array.shape for name, array in arrays.items()}
    return CheckpointInParts(folder, hashlib.sha256(text).hexdigest(), shapes)


@contextlib.contextmanager
def open_arrays(folder: Path, limit_bytes: int) -> Iterator[dict[str, ArrayInFile]]:
    """Opens the arrays of a checkpoint that several ranks wrote, for reading within the context.

    Raises Damaged, also when an array is read, if a chunk of a file does not match its checksum, or
    if a file has more than limit_bytes.
    """
    with ExitStack() as stack:
        with files.naming(folder, files.CHECKSUMS):
            opened = stack.enter_context(files.open_checkpoint(folder))
            checksums = files.parse_checksums(files.read_checksums(opened))
        with files.naming(folder, files.PROGRESS):
            files.check_progress(opened, checksums)
        arrays: dict[str, ArrayInFile] = {}
        for name in files.ARRAYS:
            with files.naming(folder, name):
                file = stack.enter_context(opened.open_file(name))
                arrays |= _arrays_of(folder, opened, name, file, checksums, limit_bytes)
        yield arrays


def sees(found: CheckpointInParts) -> bool:
    """Whether this rank sees the same checkpoint."""
    try:
        with files.open_checkpoint(found.folder) as opened:
            return hashlib.sha256(files.read_checksums(opened)).hexdigest() == found.digest
    except (OSError, ValueError):
        return False


def _arrays_of(
    folder: Path,
    opened: Folder,
    name: str,
    file: BufferedReader,
    checksums: dict[str, str],
    limit_bytes: int,
) -> dict[str, ArrayInFile]:
    files.check_length(file, limit_bytes, has_header=True)
    chunked = ChunkedFile(file, files.read_chunk_sums(opened, file, sums_of(name), checksums))
    return arrays_of(chunked, lambda: files.naming(folder, name))


def arrays_of(file: BytesOfFile, naming: Naming) -> dict[str, ArrayInFile]:
    """Returns the arrays of a safetensors file, by name. Raises OSError and files.PARSE_ERRORS;
    reading an array raises what `naming` makes of them."""
    prefix = b"".join(file.read(0, PREFIX_BYTES))
    start = PREFIX_BYTES + int.from_bytes(prefix, "little")
    places = places_of(b"".join(file.read(PREFIX_BYTES, start)))
    return {array: _in_file(file, start, place, naming) for array, place in places.items()}


def _in_file(file: BytesOfFile, start: int, place: ArrayPlace, naming: Naming) -> ArrayInFile:
    stored = place.stored
    if place.end - place.begin != math.prod(place.shape) * stored.itemsize:
        raise ValueError(f"{place.shape} numbers of {stored} in {place.end - place.begin} bytes")

    def read(runs: Iterable[tuple[int, int]]) -> np.ndarray:
        stretches = list(runs)
        numbers = np.empty(sum(behind - first for first, behind in stretches), stored)
        target = numbers.view(np.uint8).data
        done = 0
        with naming():
            for first, behind in stretches:
                begin = start + place.begin
                for piece in file.read(
                    begin + first * stored.itemsize, begin + behind * stored.itemsize
                ):
                    target[done : done + len(piece)] = piece
                    done += len(piece)
        return from_bfloat16(numbers) if place.is_bfloat16 else numbers

    return ArrayInFile(place.shape, np.dtype(np.float32) if place.is_bfloat16 else stored, read)
