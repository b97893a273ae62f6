"""Seeds made of counters: equal on every platform and rank."""

from __future__ import annotations

from typing import Any

_MASK = 2**64 - 1


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
