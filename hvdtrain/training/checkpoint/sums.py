"""Checksums of a checkpoint's files that several ranks or threads compute together: SHA-256 of each
chunk, and ByteSum.

With ByteSum, ranks compare the bytes that they had in memory with the bytes that others read from
disk. Each sends two numbers, however many stretches it has. The chunks by hand: split -b 4M
--filter=sha256sum weights.safetensors | cut -c 1-64 | cmp - weights.safetensors.chunks
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from typing import NamedTuple

import numpy as np

_SPAN_BYTES = (
    2**20
    # bytes of a file whose words have separate random numbers; other spans use multiples of them
)
_WORD_BYTES = 4
_MODULUS = 2**64


class ByteSum(NamedTuple):
    """Sums over stretches of a file. If the edges of the total equal the edges of the whole file,
    the stretches cover each byte once.

    value: the 32-bit words of the file, low byte first, each times a random number for its
    position, modulo 2**64: multilinear hashing (Lemire and Kaser 2012, arXiv:1202.4961, section 2).
    Different bytes have the same value with probability 2**-32. edges: for each stretch, the random
    number of its end minus the one of its beginning; where stretches touch, the numbers cancel.
    """

    value: int = 0
    edges: int = 0

    def with_bytes(self, begin: int, data: memoryview) -> ByteSum:
        """Adds bytes begin ... begin + len(data) - 1 of the file."""
        end = begin + len(data)
        return self.plus(
            ByteSum(_value(begin, data), _random(end, b"edge") - _random(begin, b"edge"))
        )

    def plus(self, other: ByteSum) -> ByteSum:
        return ByteSum((self.value + other.value) % _MODULUS, (self.edges + other.edges) % _MODULUS)

    def covers(self, size: int) -> bool:
        """Whether the stretches cover a file of `size` bytes, each byte once."""
        return self.edges == (_random(size, b"edge") - _random(0, b"edge")) % _MODULUS


def _value(begin: int, data: memoryview) -> int:
    total = 0
    while data:
        span, offset = divmod(begin, _SPAN_BYTES)
        piece = data[: _SPAN_BYTES - offset]
        total += (_random(span, b"span") | 1) * _value_in_span(offset, piece)
        data = data[len(piece) :]
        begin = begin + len(piece)
    return total


def _value_in_span(offset: int, data: memoryview) -> int:
    """Returns the value of bytes that begin `offset` bytes after the start of a span; incomplete
    words are padded with zeros."""
    first, lead = divmod(offset, _WORD_BYTES)
    words = np.zeros(-(-(lead + len(data)) // _WORD_BYTES), "<u4")
    words.view(np.uint8)[lead : lead + len(data)] = data
    # modulo 2**64
    return int(np.dot(words.astype(np.uint64), _random_words()[first : first + len(words)]))


@functools.cache
def _random_words() -> np.ndarray:
    """Returns raw numbers of a counter-based generator, the same in each process."""
    return np.random.Philox(key=0).random_raw(_SPAN_BYTES // _WORD_BYTES)


def _random(place: int, purpose: bytes) -> int:
    """Returns a random 64-bit number that depends only on the position."""
    return int.from_bytes(
        hashlib.blake2b(place.to_bytes(8, "little"), digest_size=8, person=purpose).digest(),
        "little",
    )


CHUNK_BYTES = 2**22
LINE_BYTES = 65  # length of a chunk's line in the text file
_THREADS = 4  # threads that read and hash
_AT_A_TIME = 64  # chunks that are handed to them


def sums_of(file: str) -> str:
    """Returns the name of the text file."""
    return f"{file}.chunks"


def count_chunks(size: int) -> int:
    """Returns the number of chunks of a file of `size` bytes."""
    return -(-size // CHUNK_BYTES)


def read_chunk(file: BufferedReader, number: int) -> bytes:
    """Reads a chunk; the last one of a file may be shorter. Raises OSError."""
    begin = number * CHUNK_BYTES
    data = bytearray()
    while len(data) < CHUNK_BYTES and (
        piece := os.pread(file.fileno(), CHUNK_BYTES - len(data), begin + len(data))
    ):
        data += piece
    return bytes(data)


def as_text(checksums: Iterable[str]) -> str:
    return "".join(f"{checksum}\n" for checksum in checksums)


class ChunkedFile:
    """A file whose chunks have checksums: only bytes that match them are returned."""

    def __init__(self, file: BufferedReader, text: str) -> None:
        """text: a line for each chunk, as as_text() writes them. Raises ValueError if the file has
        another number of chunks."""
        self._file = file
        self._expected = text.splitlines()
        self._size = os.fstat(file.fileno()).st_size
        _check_count(self._size, self._expected)
        # number of the chunk that was read last, because the next bytes are often in it, too
        self._number = -1
        self._chunk = b""

    def read(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yields bytes begin ... end - 1, in pieces. Raises OSError, and ValueError for a chunk
        that does not match its checksum."""
        while begin < end:
            number, offset = divmod(begin, CHUNK_BYTES)
            if number != self._number:
                self._number = -1
                self._chunk = read_chunk(self._file, number)
                if hashlib.sha256(self._chunk).hexdigest() != self._expected[number]:
                    raise _wrong_chunk(number, self._size)
                self._number = number
            piece = memoryview(self._chunk)[offset : offset + end - begin]
            yield piece
            begin += len(piece)


def check_chunks(
    file: BufferedReader, text: str, on_chunk: Callable[[], None] = lambda: None
) -> None:
    """Raises ValueError if a chunk of the file does not match its checksum, OSError if it cannot be
    read.

    on_chunk: called in this thread for each chunk that is right.
    """
    expected = text.splitlines()
    size = os.fstat(file.fileno()).st_size
    _check_count(size, expected)

    def is_right(number: int) -> bool:
        return hashlib.sha256(read_chunk(file, number)).hexdigest() == expected[number]

    with ThreadPoolExecutor(_THREADS) as threads:
        for first in range(0, len(expected), _AT_A_TIME):
            numbers = range(first, min(first + _AT_A_TIME, len(expected)))
            for number, right in zip(numbers, threads.map(is_right, numbers), strict=True):
                if not right:
                    raise _wrong_chunk(number, size)
                on_chunk()


def _check_count(size: int, expected: Sequence[str]) -> None:
    if len(expected) != count_chunks(size):
        raise ValueError(
            f"{size} bytes are {count_chunks(size)} chunks, of which {len(expected)} have a "
            "checksum"
        )


def _wrong_chunk(number: int, size: int) -> ValueError:
    end = min((number + 1) * CHUNK_BYTES, size)
    return ValueError(f"bytes {number * CHUNK_BYTES} to {end} do not have their checksum")
