"""ByteSum: a sum over the bytes of a file that does not depend on who adds up which of them, as a hash of the whole would.

Ranks compare by it what they had in memory with what others read from the disk: each sends two numbers, however many stretches it has.
"""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

import numpy as np

_SPAN_BYTES = 2**20  # of a file, whose words have random numbers of their own; those of another span are multiples of them
_WORD_BYTES = 4
_MODULUS = 2**64


class ByteSum(NamedTuple):
    """Sums over stretches of a file. The file is covered, each byte once, where the sum of all stretches has the edges of the whole.

    value: the 32-bit words of the file, low byte first, each times a random number of its place, modulo 2**64: multilinear hashing
    (Lemire and Kaser 2012, arXiv:1202.4961, section 2). Of other bytes it is another one but for one chance in 2**32.
    edges: a random number of the end of each stretch less that of its beginning; of stretches that touch, the middle cancels.
    """

    value: int = 0
    edges: int = 0

    def with_bytes(self, begin: int, data: memoryview) -> ByteSum:
        """With bytes begin ... begin + len(data) - 1 of the file too."""
        end = begin + len(data)
        return self.plus(ByteSum(_value(begin, data), _random(end, b"edge") - _random(begin, b"edge")))

    def plus(self, other: ByteSum) -> ByteSum:
        return ByteSum((self.value + other.value) % _MODULUS, (self.edges + other.edges) % _MODULUS)

    def covers(self, size: int) -> bool:
        """Whether the stretches are a file of so many bytes, each of them once."""
        return self.edges == (_random(size, b"edge") - _random(0, b"edge")) % _MODULUS


def _value(begin: int, data: memoryview) -> int:
    total = 0
    while data:
        span, offset = divmod(begin, _SPAN_BYTES)
        piece = data[: _SPAN_BYTES - offset]
        total += (_random(span, b"span") | 1) * _value_in_span(offset, piece)
        data, begin = data[len(piece) :], begin + len(piece)
    return total


def _value_in_span(offset: int, data: memoryview) -> int:
    """The value of bytes that begin `offset` bytes behind the first of a span; words that they fill in part are filled up with zeros."""
    first, lead = divmod(offset, _WORD_BYTES)
    words = np.zeros(-(-(lead + len(data)) // _WORD_BYTES), "<u4")
    words.view(np.uint8)[lead : lead + len(data)] = data
    return int(np.dot(words.astype(np.uint64), _random_words()[first : first + len(words)]))  # modulo 2**64


@functools.cache
def _random_words() -> np.ndarray:
    """Raw numbers of a counter, the same in each process."""
    return np.random.Philox(key=0).random_raw(_SPAN_BYTES // _WORD_BYTES)


def _random(place: int, purpose: bytes) -> int:
    """64 bits, a function of the place."""
    return int.from_bytes(hashlib.blake2b(place.to_bytes(8, "little"), digest_size=8, person=purpose).digest(), "little")
