"""The nouns that every floor shares: progress, the numbers of one step, batches, sums, arrays, and seeds made of counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import xxhash

Arrays = dict[str, np.ndarray]  # "p." weights, "b." buffers, "s." optimizer slots: {"p.fc.weight": ..., "s.fc.weight.0": ...}
# {"x": uint8 (n, H, W, C), "y": int64 (n,)} on the host, and "w": float64 (n,) where samples are weighted; a frame's own after Learner.put
Batch = dict[str, Any]
Sums = dict[str, Any]  # {"loss": sum, "right": sum, "count": n}: sums over samples, never means; device scalars

_MASK = 2**64 - 1


class Hyper(NamedTuple):
    """Every number of one step."""

    lr: float
    momentum: float  # the first beta of Adam and its kin
    weight_decay: float
    batch: int  # samples over all ranks
    step: int = 0  # updates done before this one
    noise: float = 0.0  # variance of the noise added to each number of the mean gradient
    sample_noise: float = 0.0  # standard deviation of the random weight, of mean 1, of each sample's loss


@dataclass(frozen=True)
class Progress:
    """Where a job stands. With the seed it is all that a resume needs, beside the arrays."""

    dataset: int  # samples in one epoch
    total: int  # samples in the whole job
    step: int = 0
    samples: int = 0

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return self.samples // self.dataset

    @property
    def epochs(self) -> float:
        """Epochs done, with the fraction."""
        return self.samples / self.dataset

    @property
    def done(self) -> bool:
        return self.samples >= self.total

    def advance(self, batch: int) -> Progress:
        return replace(self, step=self.step + 1, samples=self.samples + batch)


def fold(*counters: Any) -> Any:
    """A 64-bit seed from counters: fold(seed, step, rank). Equal on every platform and in every version of every library.

    Each counter is an int, or a uint64 array, which gives an array of seeds, one for each element.
    The mixing function is splitmix64's (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", fig. 17).
    """
    seed: Any = 0
    for counter in counters:
        seed = _mix(seed ^ _mix(counter + 0x9E3779B97F4A7C15 & _MASK))
    return seed


def _mix(x: Any) -> Any:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def digests(arrays: Iterable[tuple[str, np.ndarray]]) -> dict[str, int]:
    """64 bits of each named array, over its dtype, shape and bytes (XXH3, at the speed of memory): equal only if the arrays are."""
    found = {}
    for name, array in arrays:
        hashed = xxhash.xxh3_64(f"{array.dtype.str} {array.shape};".encode())
        hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        found[name] = hashed.intdigest()
    return found


def combine(each: dict[str, int]) -> str:
    """The digests of named arrays as one of 64 bits, as 16 hex digits, whatever their order."""
    return xxhash.xxh3_64_hexdigest("".join(f"{name} {each[name]:x};" for name in sorted(each)).encode())


def digest(arrays: Arrays) -> str:
    """64 bits over names, dtypes, shapes and bytes, as 16 hex digits: equal on two ranks only if the arrays are."""
    return combine(digests(arrays.items()))
