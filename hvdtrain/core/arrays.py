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

_ROWS_AT_ONCE = 2**18  # rows converted at a time for a digest


class ArrayStream(NamedTuple):
    """Arrays that arrive one after the other; the receiver keeps what it needs."""

    shapes: dict[str, tuple[int, ...]]  # shapes of all arrays that arrive
    # readable only once: numpy arrays, or ArrayInFile for a learner that is_sharded
    arrays: Iterable[tuple[str, Any]]
    is_partial: bool = False  # arrays that do not arrive remain unchanged


class ArrayInFile(NamedTuple):
    """An array in a file; a rank reads only its own elements. numpy.asarray() reads all of it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    # (first, last + 1) of each range of elements -> (n,), the concatenated ranges
    read: Callable[[Iterable[tuple[int, int]]], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.read([(0, math.prod(self.shape))]).reshape(self.shape)
        return found if dtype is None else found.astype(dtype, copy=False)


Readable = np.ndarray | ArrayInFile


def in_memory(array: Readable) -> np.ndarray:
    """Returns the array itself, or reads it from its file."""
    return array if isinstance(array, np.ndarray) else np.asarray(array)


def pieces_of(array: Readable, count: int) -> Iterator[np.ndarray]:
    """Yields the elements of an array in C order, `count` at a time."""
    size = math.prod(array.shape)
    flat = array.reshape(-1) if isinstance(array, np.ndarray) else None
    for start in range(0, size, count):
        stop = min(start + count, size)
        if flat is not None:
            yield flat[start:stop]
        elif isinstance(array, ArrayInFile):
            yield array.read([(start, stop)])


def as_stream(state: Arrays | ArrayStream) -> ArrayStream:
    """Returns arrays in memory as a stream."""
    return (
        state
        if isinstance(state, ArrayStream)
        else ArrayStream({n: a.shape for n, a in state.items()}, state.items())
    )


# On the host {"x": uint8 (n, H, W, C), "y": int64 (n,)}; after Learner.to_device() arrays of the
# framework. Further keys, if they apply: "augmentation" AugmentationParameters of "x" "partner_x",
# "partner_y", "partner_augmentation" the same for the samples that mixup or CutMix mixes in
# "mixup_weight"          float64 (n,), the weight of "y", and with mixup of "x", in the mixture
# "cutmix_box"            int64 (n, 4), the box of "partner_x" that is pasted into "x": top, bottom,
# left, right "w"                     float64 (n,), the weight of each sample's loss "indices",
# "partner_indices"    int64 (n,), instead of images and labels: samples of a data set that is
# cached on the device
Batch = dict[str, Any]
_OF_PARTNERS = ("partner_indices", "partner_x", "partner_y", "partner_augmentation")
# fields must not have these names
BATCH_KEYS = frozenset(
    {"augmentation", "mixup_weight", "cutmix_box", "w", "indices", *_OF_PARTNERS}
)


def digests(arrays: Iterable[tuple[str, np.ndarray]]) -> dict[str, int]:
    """Returns a 64-bit digest of each named array's dtype, shape and bytes, by XXH3 at memory
    speed."""
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
    """Returns a 64-bit digest of names, dtypes, shapes and bytes, as 16 hex digits."""
    return combine(digests(arrays.items()))


def digest_as(dtype: str, name: str, array: np.ndarray) -> str:
    """Returns digest() of one array converted to this dtype. It is converted in pieces, because it
    may be memory-mapped and larger than the memory."""
    pieces = (
        array[start : start + _ROWS_AT_ONCE].astype(dtype, copy=False)
        for start in range(0, len(array), _ROWS_AT_ONCE)
    )
    return combine({name: _digest_of_parts(np.dtype(dtype).str, array.shape, pieces)})


class Cut(NamedTuple):
    """One part of an array that is partitioned along an axis. Arrays are numpy arrays or torch
    tensors.

    The axis may consist of several groups that are partitioned separately, such as queries, keys
    and values in one matrix, with some heads on each rank. A group that does not divide evenly is
    split as numpy.array_split does: the first parts get one more.
    """

    axis: int = 0
    groups: int = 1
    parts: int = 1  # ranks
    part: int = 0  # this rank's, from 0
    length: int = 0  # length of the axis of the whole array; 0: the parts are equal

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part, for a whole array of this shape."""
        first, behind, _ = self._stretch(shape)
        return (
            shape
            if self.parts == 1
            else (*shape[: self.axis], (behind - first) * self.groups, *shape[self.axis + 1 :])
        )

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the whole array, for a part of this shape."""
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
        """Writes the part `array` into the contiguous array `whole`, the inverse of take()."""
        stretches = self._in_stretches(whole)
        stretches[...] = array.reshape(stretches.shape)

    def runs(self, shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields where elements start ... stop - 1 of the part are in the whole array of this
        shape: (first, last + 1) of each contiguous range."""
        first, behind, every = self._stretch(shape)
        inner = math.prod(shape[self.axis + 1 :]) if self.parts > 1 else 1
        own = (behind - first) * inner  # elements of the part in each range
        while start < stop:
            number, offset = divmod(start, own)
            begin = (number * every + first) * inner + offset
            length = min(own - offset, stop - start)
            yield begin, begin + length
            start += length

    def _stretch(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Returns the bounds in each group of the axis: the part's first row, its last row + 1, and
        the number of rows in the group."""
        if self.parts == 1:
            return 0, math.prod(shape), math.prod(shape)
        every, rest = divmod(shape[self.axis], self.groups)
        assert not rest and self.length in (0, shape[self.axis]), (shape, self)
        rows, more = divmod(every, self.parts)
        assert not more or self.length, (shape, self)
        first = self.part * rows + min(self.part, more)
        return first, first + rows + (self.part < more), every

    def _in_stretches(self, whole: Any) -> Any:
        """Returns (groups, rows of the part, elements of a row), a view if possible."""
        first, behind, every = self._stretch(tuple(whole.shape))
        inner = math.prod(whole.shape[self.axis + 1 :]) if self.parts > 1 else 1
        stretches = math.prod(whole.shape) // (every * inner) if every * inner else 1
        return whole.reshape((stretches, every, inner))[:, first:behind]


WHOLE = Cut()


def elements(array: Any, cut: Cut, start: int, stop: int) -> Any:
    """Returns elements start ... stop - 1 of a cut of an array, (stop - start,); reads only these
    from an ArrayInFile."""
    if isinstance(array, ArrayInFile):
        return array.read(cut.runs(array.shape, start, stop))
    return cut.take(array).reshape(-1)[start:stop]


class Piece(NamedTuple):
    """Elements start ... stop - 1 of a named array, or of a cut of it, in C order.

    read() returns the numbers, in the array's shape if it is replicated, else (stop - start,).
    Arrays in host memory are not copied, and may change in the next step. Arrays on a GPU are
    copied into memory that the next read() of any piece of the learner overwrites.
    """

    name: str
    shape: tuple[int, ...]  # of the whole array
    start: int
    stop: int
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]
    is_whole: bool  # the array is replicated, equal on all ranks
    is_mine: bool = False  # for a part: whether this rank is the first that has it
    cut: Cut = WHOLE
    # returns a 64-bit hash, computed on the device of the array; None: the array is copied to the
    # host
    hash_in_place: Callable[[], Any] | None = None
    is_of_ranks: bool = False  # (ranks, ...): another number of ranks can load it too

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yields the positions of its elements in the whole array, in order: (first, last + 1) of
        each range."""
        return self.cut.runs(self.shape, self.start, self.stop)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def copied(self) -> Piece:
        """Returns the piece with a private copy of its numbers."""
        array = self.read().copy()
        return self._replace(read=lambda: array, hash_in_place=None)


def whole(name: str, array: Readable) -> Piece:
    """Returns the piece of a replicated array in host memory or in a file."""
    size = math.prod(array.shape)
    return Piece(name, array.shape, 0, size, array.dtype, lambda: in_memory(array), True)


def digests_of_pieces(pieces: Iterable[tuple[str, Piece]]) -> dict[str, int]:
    """Returns a 64-bit digest of each piece by name; only digests are copied from a device."""
    found: dict[str, int] = {}
    in_place: dict[str, tuple[Piece, Any]] = {}
    for name, piece in pieces:
        if piece.hash_in_place is None:
            found[name] = digests([(name, piece.read())])[name]
        else:
            found[name] = 0  # filled below, so that the host waits once for all of them
            in_place[name] = (piece, piece.hash_in_place())
    for name, (piece, number) in in_place.items():
        shape = piece.shape if piece.is_whole else (piece.stop - piece.start,)
        text = f"{piece.dtype.str} {shape};{int(number):x}"
        found[name] = xxhash.xxh3_64_intdigest(text.encode())
    return found


def whole_arrays(pieces: Iterable[Piece]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the replicated arrays by name; each is valid until the next one is requested."""
    return ((piece.name, piece.read()) for piece in pieces if piece.is_whole)


# columns: partitioned outputs; rows: partitioned inputs, tokens of an embedding, or numbers of a
# shard
Way = Literal["whole", "columns", "rows"]


def shown_bytes(count: float) -> str:
    """Formats bytes, as in 1.2 MB, 16 kB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} bytes"
