"""64-bit digests of named arrays, to compare ranks and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import xxhash

from hvdtrain.core.arrays import Arrays

_PIECE = 2**18  # rows


def digests(arrays: Iterable[tuple[str, np.ndarray]]) -> dict[str, int]:
    """64 bits for each named array, over its dtype, shape and bytes; by XXH3, at the speed of memory."""
    return {name: _digest_of_parts(array.dtype.str, array.shape, [array]) for name, array in arrays}


def _digest_of_parts(dtype: str, shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> int:
    hashed, size = xxhash.xxh3_64(f"{dtype} {shape};".encode()), 0
    for part in parts:
        hashed.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        size += part.size
    assert size == math.prod(shape), (size, shape)
    return hashed.intdigest()


def combine(each: dict[str, int]) -> str:
    """One digest of 64 bits, as 16 hex digits, from those of named arrays in any order."""
    return xxhash.xxh3_64_hexdigest("".join(f"{name} {each[name]:x};" for name in sorted(each)).encode())


def digest(arrays: Arrays) -> str:
    """64 bits over names, dtypes, shapes and bytes, as 16 hex digits: differ, but for a collision, where the arrays do."""
    return combine(digests(arrays.items()))


def digest_as(dtype: str, name: str, array: np.ndarray) -> str:
    """digest() of one array converted to this type, a piece at a time: it may be mapped from a file, and larger than the memory."""
    pieces = (array[start : start + _PIECE].astype(dtype, copy=False) for start in range(0, len(array), _PIECE))
    return combine({name: _digest_of_parts(np.dtype(dtype).str, array.shape, pieces)})
