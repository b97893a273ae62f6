"""Named arrays, as in a checkpoint: their digests, their parts (Piece, Cut) and their layout over
ranks; batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

# "p." weights, "b." buffers, "s." optimizer state: {"p.fc.weight": ..., "s.fc.weight.0": ...}
Arrays = dict[str, np.ndarray]

_ROWS_AT_ONCE = 2**18  # of a digest


class ArrayStream(NamedTuple):
    """Arrays that arrive one after the other; the receiver keeps what it needs."""

    shapes: dict[str, tuple[int, ...]]  # of all that come
    # to be read once: numpy arrays, or of a learner that is_sharded ArrayInFile
    arrays: Iterable[tuple[str, Any]]
    is_partial: bool = False  # arrays that do not arrive stay as they are


class ArrayInFile(NamedTuple):
    """An array of a file; a rank reads the elements that it has. numpy.asarray() reads it whole."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    # (first, last + 1) of each stretch of elements -> (n,), one stretch after the other
    read: Callable[[Iterable[tuple[int, int]]], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.read([(0, math.prod(self.shape))]).reshape(self.shape)
        return found if dtype is None else found.astype(dtype, copy=False)


def as_stream(state: Arrays | ArrayStream) -> ArrayStream:
    """Arrays in memory as a stream."""
    return (
        state
        if isinstance(state, ArrayStream)
        else ArrayStream({n: a.shape for n, a in state.items()}, state.items())
    )


# On the host {"x": uint8 (n, H, W, C), "y": int64 (n,)}; after Learner.to_device() arrays of the
# framework. Further keys, where they apply:
#   "augmentation"          AugmentationParameters of "x"
# "partner_x", "partner_y", "partner_augmentation"    the same of the samples that are mixed in, by
# mixup or CutMix
#   "mixup_weight"          float64 (n,), the weight of "y", and with mixup of "x", in the mixture
# "cutmix_box"            int64 (n, 4), the box of "partner_x" that is pasted into "x": top, bottom,
# left, right
#   "w"                     float64 (n,), the weight of each sample's loss
# "indices", "partner_indices"    int64 (n,), in place of images and labels: samples of a data set
# that is cached on the device
Batch = dict[str, Any]
_OF_PARTNERS = ("partner_indices", "partner_x", "partner_y", "partner_augmentation")
# no field has these names
BATCH_KEYS = frozenset(
    {"augmentation", "mixup_weight", "cutmix_box", "w", "indices", *_OF_PARTNERS}
)


def digests(arrays: Iterable[tuple[str, np.ndarray]]) -> dict[str, int]:
    """64 bits for each named array, over its dtype, shape and bytes; by XXH3, at the speed of
    memory."""
    return {name: _digest_of_parts(array.dtype.str, array.shape, [array]) for name, array in arrays}


def _digest_of_parts(dtype: str, shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> int:
    hashed = xxhash.xxh3_64(f"{dtype} {shape};".encode())
    size = 0
    for part in parts:
        hashed.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        size += part.size
    assert size == math.prod(shape), (size, shape)
    return hashed.intdigest()


def combine(each: dict[str, int]) -> str:
    """Combines the digests of named arrays, in any order, into one of 64 bits, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(
        "".join(f"{name} {each[name]:x};" for name in sorted(each)).encode()
    )


def digest(arrays: Arrays) -> str:
    """A 64-bit digest over names, dtypes, shapes and bytes, as 16 hex digits."""
    return combine(digests(arrays.items()))


def digest_as(dtype: str, name: str, array: np.ndarray) -> str:
    """digest() of one array converted to this type, a piece at a time: it may be mapped from a
    file, and larger than the memory."""
    pieces = (
        array[start : start + _ROWS_AT_ONCE].astype(dtype, copy=False)
        for start in range(0, len(array), _ROWS_AT_ONCE)
    )
    return combine({name: _digest_of_parts(np.dtype(dtype).str, array.shape, pieces)})


class Cut(NamedTuple):
    """One of the parts of an array that is cut along one axis. Arrays are numpy arrays or torch
    tensors.

    The axis may consist of several groups that are each cut, such as queries, keys and values in
    one matrix, with some heads on each rank. A group that does not divide evenly is split as
    numpy.array_split does: the first parts get one more.
    """

    axis: int = 0
    groups: int = 1
    parts: int = 1  # ranks
    part: int = 0  # this rank's, from 0
    length: int = 0  # of the axis of the whole; 0: the parts are equal

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part, for a whole array of this shape."""
        first, behind, _ = self._stretch(shape)
        return (
            shape
            if self.parts == 1
            else (*shape[: self.axis], (behind - first) * self.groups, *shape[self.axis + 1 :])
        )

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole array, for a part of this shape."""
        if self.parts == 1:
            return shape
        return (
            *shape[: self.axis],
            self.length or shape[self.axis] * self.parts,
            *shape[self.axis + 1 :],
        )

    def take(self, whole: Any) -> Any:
        """Extracts the part; it may be a view."""
        shape = tuple(whole.shape)
        return self._in_stretches(whole).reshape(self.local_shape(shape))

    def put(self, whole: Any, array: Any) -> None:
        """The inverse of take(): writes the part, `array`, into the whole, which is contiguous."""
        stretches = self._in_stretches(whole)
        stretches[...] = array.reshape(stretches.shape)

    def runs(self, shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The positions of elements start ... stop - 1 of the part in the whole of this shape:
        (first, last + 1) of each stretch."""
        first, behind, every = self._stretch(shape)
        inner = math.prod(shape[self.axis + 1 :]) if self.parts > 1 else 1
        own = (behind - first) * inner  # elements of the part in each stretch
        while start < stop:
            number, offset = divmod(start, own)
            begin = (number * every + first) * inner + offset
            length = min(own - offset, stop - start)
            yield begin, begin + length
            start += length

    def _stretch(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Bounds in each stretch of the axis: the part's first row, its last row + 1, and the
        stretch's number of rows."""
        if self.parts == 1:
            return 0, math.prod(shape), math.prod(shape)
        every, rest = divmod(shape[self.axis], self.groups)
        assert not rest and self.length in (0, shape[self.axis]), (shape, self)
        rows, more = divmod(every, self.parts)
        assert not more or self.length, (shape, self)
        first = self.part * rows + min(self.part, more)
        return first, first + rows + (self.part < more), every

    def _in_stretches(self, whole: Any) -> Any:
        """(stretches, rows of the part, elements of a row), a view if possible."""
        first, behind, every = self._stretch(tuple(whole.shape))
        inner = math.prod(whole.shape[self.axis + 1 :]) if self.parts > 1 else 1
        stretches = math.prod(whole.shape) // (every * inner) if every * inner else 1
        return whole.reshape((stretches, every, inner))[:, first:behind]


WHOLE = Cut()


def elements(array: Any, cut: Cut, start: int, stop: int) -> Any:
    """Elements start ... stop - 1 of a cut of an array, (stop - start,); of an ArrayInFile only
    they are read."""
    if isinstance(array, ArrayInFile):
        return array.read(cut.runs(array.shape, start, stop))
    return cut.take(array).reshape(-1)[start:stop]


class Piece(NamedTuple):
    """Elements start ... stop - 1 of a named array, or of a cut of it, in the order of C.

    read() returns the numbers: in that shape if the array is replicated, else (stop - start,).
    Arrays in host memory are not copied, and may change in the next step. Arrays on a GPU are
    copied into memory that the next read() of any piece of the learner overwrites.
    """

    name: str
    shape: tuple[int, ...]  # of the whole array
    start: int
    stop: int
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]
    is_whole: bool  # every rank has all of it; the same on all ranks
    is_mine: bool = False  # for a part: whether this is the first rank that has it
    cut: Cut = WHOLE
    # a number that int() takes, of 64 bits, from the bytes where they lie; None: they are read
    hash_in_place: Callable[[], Any] | None = None

    def runs(self) -> Iterator[tuple[int, int]]:
        """The positions of its elements in the whole array, in order: (first, last + 1) of each
        stretch."""
        return self.cut.runs(self.shape, self.start, self.stop)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def copied(self) -> Piece:
        """The piece with a private copy of its numbers."""
        array = self.read().copy()
        return self._replace(read=lambda: array, hash_in_place=None)


def whole(name: str, array: np.ndarray) -> Piece:
    """A piece of an array that every rank has, in host memory."""
    return Piece(name, array.shape, 0, array.size, array.dtype, lambda: array, True)


def digests_of_pieces(pieces: Iterable[tuple[str, Piece]]) -> dict[str, int]:
    """64 bits for each piece, by the name that comes with it; only digests come from a device."""
    found: dict[str, int] = {}
    in_place: dict[str, tuple[Piece, Any]] = {}
    for name, piece in pieces:
        if piece.hash_in_place is None:
            found[name] = digests([(name, piece.read())])[name]
        else:
            found[name] = 0  # the host waits once for all of them
            in_place[name] = (piece, piece.hash_in_place())
    for name, (piece, number) in in_place.items():
        shape = piece.shape if piece.is_whole else (piece.stop - piece.start,)
        text = f"{piece.dtype.str} {shape};{int(number):x}"
        found[name] = xxhash.xxh3_64_intdigest(text.encode())
    return found


def whole_arrays(pieces: Iterable[Piece]) -> Iterator[tuple[str, np.ndarray]]:
    """The replicated arrays by name; each is valid until the next one is requested."""
    return ((piece.name, piece.read()) for piece in pieces if piece.is_whole)


# columns: outputs are cut; rows: inputs, the tokens of an embedding, or the numbers of a shard
Way = Literal["whole", "columns", "rows"]


def shown_bytes(count: float) -> str:
    """1.2 MB, 16 kB"""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} bytes"
