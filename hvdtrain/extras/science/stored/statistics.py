"""Mean and deviation of a field of a large set, in one pass that is divided among the ranks. The
bits are the same on any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hvdtrain.core.folder import Folder
from hvdtrain.data.array_files import ReadingRanks
from hvdtrain.data.field import Channels, channel_count, columns_of_channels
from hvdtrain.data.files.folders import cache_root

_VALUES = 2**20  # approximate number of values in a piece


ALONE = ReadingRanks(0, 1, lambda array, name: array)


def mean_and_std(
    read: Callable[[np.ndarray], np.ndarray],
    samples: int,
    shape: tuple[int, ...],
    ranks: ReadingRanks,
    channels: Channels = "last",
) -> np.ndarray:
    """Returns mean and deviation along the axis of the channels, float64 (2, C); the deviation of a
    constant channel is 1. Every rank calls it.

    read: returns the numbers of samples, int64 (n,), as (n, *shape).
    """
    columns = channel_count(shape, channels)
    rows = max(1, _VALUES // max(1, math.prod(shape)))
    firsts = range(0, samples, rows)
    # for each piece: number of rows, mean, sum of squared deviations
    pieces = np.zeros((len(firsts), 3, columns))
    for number in range(
        len(firsts) * ranks.rank // ranks.size, len(firsts) * (ranks.rank + 1) // ranks.size
    ):
        rows_of_piece = np.arange(firsts[number], min(samples, firsts[number] + rows))
        values = columns_of_channels(read(rows_of_piece).astype(np.float64), channels)
        pieces[number] = _piece(values)
    return _together(ranks.add_up(pieces.ravel(), "statistics.pieces").reshape(pieces.shape))


def _piece(values: np.ndarray) -> np.ndarray:
    """Returns (3, C) of numbers (n, C): how many are not NaN, their mean, and the sum of squares
    about it."""
    missing = np.isnan(values)
    if not missing.any():
        mean = values.mean(0)
        squares = np.square(values - mean).sum(0)
        return np.stack([np.full(len(mean), len(values)), mean, squares])
    counts = len(values) - missing.sum(0)
    mean = np.where(missing, 0.0, values).sum(0) / np.maximum(counts, 1)
    squares = np.square(np.where(missing, 0.0, values - mean)).sum(0)
    return np.stack([counts, mean, squares])


def _together(pieces: np.ndarray) -> np.ndarray:
    """Combines the pieces by Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise
    algorithm", eq. 2.1, for all pieces at once, with exact sums."""
    found = []
    for counts, means, squares in pieces.transpose(2, 1, 0):
        count = math.fsum(counts) or 1.0  # of a channel without values
        mean = math.fsum(counts * means) / count
        square = math.fsum([*squares, *(counts * np.square(means - mean))]) / count
        found.append((mean, math.sqrt(square) if square else 1.0))
    return np.array(found).T


def kept(
    key: str, columns: int, ranks: ReadingRanks, compute: Callable[[], np.ndarray]
) -> np.ndarray:
    """Returns the result of compute(), float64 (2, columns), from a file of rank 0 if it was
    computed before. Every rank calls it.

    key: names the file; if it is empty, nothing is kept.
    """
    if not key:
        return compute()
    path = cache_root() / "statistics" / f"{key}.json"
    found = _read(path, columns) if ranks.rank == 0 else None
    shared = np.zeros(1 + 2 * columns)
    if found is not None:
        shared = np.concatenate([[1.0], found.ravel()])
    shared = ranks.add_up(shared, "statistics.kept")
    if shared[0]:
        return shared[1:].reshape(2, columns)
    computed = compute()
    if ranks.rank == 0:
        _write(path, computed)
    return computed


def _read(path: Path, columns: int) -> np.ndarray | None:
    """Reads the numbers in the file; None if it is absent or damaged."""
    try:
        found = np.array(json.loads(path.read_text()), np.float64)
    except (OSError, ValueError, TypeError):
        return None
    return (
        found
        if found.shape == (2, columns) and np.isfinite(found).all() and (found[1] > 0).all()
        else None
    )


def _write(path: Path, found: np.ndarray) -> None:
    """Writes the file completely or not at all. If the folder is not writable, the next job
    computes the numbers again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with Folder.open(path.parent) as folder:
            folder.replace(path.name, json.dumps(found.tolist()).encode())
    except OSError:
        return
