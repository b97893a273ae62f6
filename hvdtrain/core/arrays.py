"""Named arrays, as in a checkpoint, and their 64-bit digests, to compare ranks and checkpoints; and batches of samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import xxhash

# "p." weights, "b." buffers, "s." optimizer state: {"p.fc.weight": ..., "s.fc.weight.0": ...}
Arrays = dict[str, np.ndarray]
_ROWS_AT_ONCE = 2**18  # of a digest


class ArrayStream(NamedTuple):
    """Arrays that come one after the other, of which the receiver keeps what it needs."""

    shapes: dict[str, tuple[int, ...]]  # of all that come
    arrays: Iterable[tuple[str, np.ndarray]]  # to be read once
    is_partial: bool = False  # what does not come stays as it is


def as_stream(state: Arrays | ArrayStream) -> ArrayStream:
    """Arrays in memory as a stream."""
    return state if isinstance(state, ArrayStream) else ArrayStream({n: a.shape for n, a in state.items()}, state.items())


# On the host {"x": uint8 (n, H, W, C), "y": int64 (n,)}; after Learner.to_device() arrays of the framework. Further keys, where they apply:
#   "augmentation"          AugmentationParameters of "x"
#   "partner_x", "partner_y", "partner_augmentation"    the same of the samples that mixup mixes in
#   "mixup_weight"          float64 (n,), the weight of "x" in its mixture
#   "w"                     float64 (n,), the weight of each sample's loss
#   "indices", "partner_indices"    int64 (n,), in place of images and labels: samples of a data set that is cached on the device
Batch = dict[str, Any]


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
    pieces = (array[start : start + _ROWS_AT_ONCE].astype(dtype, copy=False) for start in range(0, len(array), _ROWS_AT_ONCE))
    return combine({name: _digest_of_parts(np.dtype(dtype).str, array.shape, pieces)})
