"""64-bit digests of named arrays, to compare ranks and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

from hvdtrain.core.arrays import Arrays


def digests(arrays: Iterable[tuple[str, np.ndarray]]) -> dict[str, int]:
    """64 bits for each named array, over its dtype, shape and bytes; by XXH3, at the speed of memory."""
    found = {}
    for name, array in arrays:
        hashed = xxhash.xxh3_64(f"{array.dtype.str} {array.shape};".encode())
        hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        found[name] = hashed.intdigest()
    return found


def combine(each: dict[str, int]) -> str:
    """One digest of 64 bits, as 16 hex digits, from those of named arrays in any order."""
    return xxhash.xxh3_64_hexdigest("".join(f"{name} {each[name]:x};" for name in sorted(each)).encode())


def digest(arrays: Arrays) -> str:
    """64 bits over names, dtypes, shapes and bytes, as 16 hex digits: differ, but for a collision, where the arrays do."""
    return combine(digests(arrays.items()))
