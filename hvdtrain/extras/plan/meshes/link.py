"""The links between ranks, fitted to measured allreduces: alpha is the latency of a message, beta
the seconds of a byte (Hockney 1994)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# share of a step's computation: two matrix products for each one in the forward pass
BACKWARD = 2 / 3
# the name in `bench allreduce` for a reduce-scatter followed by an all-gather
IN_PARTS = "reduce-scatter, all-gather"


class Link(NamedTuple):
    """The connection from one rank to another; each rank has its own."""

    name: str
    latency_s: float  # alpha, the latency of a message
    bytes_per_s: float  # 1 / beta; includes the summation of received data


class MeasuredAllreduce(NamedTuple):
    size_bytes: float
    seconds: float


def link_points(result: Mapping[str, Any]) -> list[MeasuredAllreduce]:
    """Returns the median seconds of the engine's allreduce of one vector, from the JSON of bench
    allreduce."""
    return [
        MeasuredAllreduce(row["bytes"], row["quartiles_s"][1])
        for row in result["rows"]
        if row["method"] == "allreduce"
    ]


def fit_link(points: Sequence[MeasuredAllreduce], ranks: int, name: str = "measured") -> Link:
    """Fits latency and bandwidth of ring allreduces, by the least sum of squared relative
    errors."""
    rows = np.array(
        [[2 * (ranks - 1), 2 * (ranks - 1) / ranks * point.size_bytes] for point in points]
    )
    latency, beta = least_squares(rows, np.array([point.seconds for point in points]))
    return Link(name, latency, 1 / beta if beta else math.inf)


def least_squares(
    rows: np.ndarray, seconds: np.ndarray, known: np.ndarray | float = 0.0
) -> list[float]:
    """Solves rows x + known = seconds for factors x >= 0, by relative errors. A column whose factor
    would be negative is dropped."""
    kept = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    while kept:
        relative = rows[:, kept] / seconds[:, None]
        # bytes and messages differ by nine orders of magnitude
        norms = np.linalg.norm(relative, axis=0)
        normalized = np.linalg.lstsq(relative / norms, (seconds - known) / seconds, rcond=None)[0]
        if normalized.min() >= 0:
            factors = dict(zip(kept, normalized / norms, strict=True))
            return [float(factors.get(column, 0.0)) for column in range(rows.shape[1])]
        kept.pop(int(normalized.argmin()))
    return [0.0] * rows.shape[1]
