"""Writes arrays to a safetensors file directly from memory, with the checksum of exactly these
bytes, and maps them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from io import BufferedReader
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from hvdtrain.core.arrays import ArrayInFile, Arrays, Readable, in_memory

_NAMES = {  # names of dtypes in a safetensors file
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "uint64": "U64",
    "int32": "I32",
    "uint32": "U32",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
# bfloat16: only read
_TYPES = {code: np.dtype(name).newbyteorder("<") for name, code in _NAMES.items()} | {
    "BF16": np.dtype("<u2")
}
_ALIGNMENT = 8  # of the first array
PREFIX_BYTES = 8  # of a file: the length of its header
HEADER_BYTES = 256  # of an array in a header, unless its name is long
MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library: about 800,000 arrays
PIECE_BYTES = 2**22  # hashed and then written while they are in the CPU's cache


def write_arrays(
    file: BinaryIO,
    arrays: Arrays,
    metadata: dict[str, str] | None = None,
    on_piece: Callable[[int], None] = lambda nbytes: None,
) -> str:
    """Writes arrays without a second copy in memory; returns the SHA-256 of what was written, as
    sha256sum prints it.

    on_piece: called with the bytes of each piece that was written.

    Raises OSError, and ValueError for an array that the format does not support.
    """
    checksum = hashlib.sha256()
    ordered = in_order(arrays)
    for data in (memoryview(make_header(ordered, metadata)), *map(to_bytes, ordered.values())):
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            checksum.update(piece)
            file.write(piece)
            on_piece(len(piece))
    return checksum.hexdigest()


def map_arrays(file: BufferedReader) -> Arrays:
    """Returns read-only views of the arrays of a checked file. They do not count towards the
    process's limits (ulimit -d).

    Raises KeyError for an unsupported number type, and ValueError for two arrays of one name or an
    array of too many dimensions.
    """
    return {name: in_memory(array) for name, array in map_unconverted(file).items()}


def map_unconverted(file: BufferedReader) -> dict[str, Readable]:
    """Maps arrays as map_arrays() does, but without memory for those of bfloat16: reading them
    converts them to float32."""
    file.seek(0)
    length = int.from_bytes(file.read(PREFIX_BYTES), "little")
    places = places_of(file.read(length))
    data = (
        np.memmap(file, np.uint8, mode="r", offset=PREFIX_BYTES + length)
        if any(place.end for place in places.values())
        else np.zeros(0, np.uint8)
    )
    arrays: dict[str, Readable] = {}
    for name, place in places.items():
        numbers = data[place.begin : place.end].view(place.stored).reshape(place.shape)
        arrays[name] = _converted_later(numbers) if place.is_bfloat16 else numbers
    return arrays


def _converted_later(numbers: np.ndarray) -> ArrayInFile:
    flat = numbers.reshape(-1)

    def read(runs: Iterable[tuple[int, int]]) -> np.ndarray:
        parts = [flat[first:behind] for first, behind in runs]
        return from_bfloat16(np.concatenate(parts) if parts else flat[:0])

    return ArrayInFile(numbers.shape, np.dtype(np.float32), read)


def from_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Returns the float32 numbers with these upper 16 bits."""
    return (numbers.astype(np.uint32) << 16).view(np.float32)


class ArrayPlace(NamedTuple):
    """The place of an array's numbers in a safetensors file."""

    code: str  # name of their dtype: "F32"
    shape: tuple[int, ...]
    begin: int  # in bytes, from the end of the header
    end: int

    @property
    def stored(self) -> np.dtype[Any]:
        """The type of the numbers in the file, uint16 for bfloat16. Raises KeyError for a type that
        is not supported."""
        return _TYPES[self.code]

    @property
    def is_bfloat16(self) -> bool:
        """Whether from_bfloat16() converts the numbers."""
        return self.code == "BF16"


def places_of(header: bytes) -> dict[str, ArrayPlace]:
    """Returns the arrays of a header, without its 8 bytes of length, by name. Raises ValueError for
    two arrays of one name."""
    tree = json.loads(header, object_pairs_hook=_without_twins)
    tree.pop("__metadata__", None)
    return {
        name: ArrayPlace(of["dtype"], tuple(of["shape"]), *of["data_offsets"])
        for name, of in tree.items()
    }


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("it has two arrays of one name")
    return values


def in_order(arrays: Arrays) -> Arrays:
    """Returns arrays in the order of the file, in which each begins at a multiple of its item
    size."""
    return dict(sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def make_header(arrays: Arrays, metadata: dict[str, str] | None = None) -> bytes:
    """8 bytes of length, and JSON: {"p.fc.weight": {"dtype": "F32", "shape": [10, 64],
    "data_offsets": [0, 2560]}, ...}.

    Raises ValueError for a header that no reader accepts.
    """
    tree: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, array in arrays.items():
        if array.dtype.name not in _NAMES:
            raise ValueError(
                f"{name} has numbers of type {array.dtype}, which safetensors does not have"
            )
        begin = end
        end = end + array.nbytes
        tree[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MOST_HEADER_BYTES:
        raise ValueError(
            f"the header has {len(text)} bytes for {len(arrays)} arrays, but safetensors reads at "
            f"most {MOST_HEADER_BYTES}"
        )
    return len(text).to_bytes(8, "little") + text


def to_bytes(array: np.ndarray) -> memoryview:
    """Returns the bytes of the numbers in C order, low byte first; an array with another layout is
    copied."""
    numbers: np.ndarray = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    return numbers.reshape(-1).view(np.uint8).data
