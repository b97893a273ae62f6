"""SHA-256 of each chunk of a file, in a text file beside it: several ranks, or threads, make and check them at a time.

By hand: split -b 4M --filter=sha256sum weights.safetensors | cut -c 1-64 | cmp - weights.safetensors.chunks
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader

CHUNK_BYTES = 2**22
LINE_BYTES = 65  # of a chunk in the text file
_THREADS = 4  # that read and hash
_AT_A_TIME = 64  # chunks that are handed to them


def sums_of(file: str) -> str:
    """The name of the text file."""
    return f"{file}.chunks"


def count_chunks(size: int) -> int:
    """The chunks of a file of so many bytes."""
    return -(-size // CHUNK_BYTES)


def read_chunk(file: BufferedReader, number: int) -> bytes:
    """The last one of a file may be shorter. Raises OSError."""
    begin, data = number * CHUNK_BYTES, bytearray()
    while len(data) < CHUNK_BYTES and (piece := os.pread(file.fileno(), CHUNK_BYTES - len(data), begin + len(data))):
        data += piece
    return bytes(data)


def as_text(checksums: Iterable[str]) -> str:
    return "".join(f"{checksum}\n" for checksum in checksums)


def check_chunks(file: BufferedReader, text: str, on_chunk: Callable[[], None] = lambda: None) -> None:
    """Raises ValueError where a chunk of the file does not have the checksum of its line, OSError where it cannot be read.

    on_chunk: called in this thread for each chunk that is right.
    """
    expected, size = text.splitlines(), os.fstat(file.fileno()).st_size
    if len(expected) != count_chunks(size):
        raise ValueError(f"{size} bytes are {count_chunks(size)} chunks, of which {len(expected)} have a checksum")

    def is_right(number: int) -> bool:
        return hashlib.sha256(read_chunk(file, number)).hexdigest() == expected[number]

    with ThreadPoolExecutor(_THREADS) as threads:
        for first in range(0, len(expected), _AT_A_TIME):
            numbers = range(first, min(first + _AT_A_TIME, len(expected)))
            for number, right in zip(numbers, threads.map(is_right, numbers), strict=True):
                if not right:
                    begin, end = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, size)
                    raise ValueError(f"bytes {begin} to {end} do not have their checksum")
                on_chunk()
