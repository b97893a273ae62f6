"""Statistics of repeated timings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Quartiles(NamedTuple):
    low: float  # a quarter of the values is below
    median: float
    high: float  # a quarter of the values is above


def quartiles(values: Sequence[float]) -> Quartiles:
    """Interpolated, and never outside of the values; of one value three times that value."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def median_speedup(seconds: Sequence[float], other_seconds: Sequence[float]) -> float:
    """How many times as fast as the other: the median of the ratio in each round; both have the same rounds."""
    return statistics.median(other / ours for ours, other in zip(seconds, other_seconds, strict=True))
