"""Mean and deviation of the numbers of a data set, exact and the same bits on every rank."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hvdtrain.core.seeds import fold
from hvdtrain.data.source import Field, LabelledImages, Source

_VALUES = 2**22  # that are read at most: about 2 s of exact sums


class ColumnStats(NamedTuple):
    """Over the last axis of a field, float64 (C,) each; of single numbers (1,)."""

    mean: np.ndarray
    std: np.ndarray  # 1 where a column is constant


def column_stats(source: Source, name: str) -> ColumnStats:
    """Statistics of a field, from at most 2**22 of its numbers, drawn by counters, without rounding; of labelled images as they are."""
    if name == "x" and isinstance(source, LabelledImages):
        return ColumnStats(*source.stats())
    field, samples = source.fields[name], len(source)
    most = max(1, _VALUES // max(1, math.prod(field.shape)))
    chosen = np.arange(samples)
    if samples > most:
        chosen = np.unique(fold(np.arange(most, dtype=np.uint64)) % np.uint64(samples)).astype(np.int64)
    values = source.read(chosen)[name].astype(np.float64).reshape(-1, field.shape[-1] if field.shape else 1)  # (values, C)
    values = values / (255.0 if is_image(field) else 1.0)
    means = [math.fsum(column.tolist()) / len(column) for column in values.T]
    squares = [math.fsum(((column - mean) ** 2).tolist()) / len(column) for column, mean in zip(values.T, means, strict=True)]
    return ColumnStats(np.array(means), np.array([math.sqrt(square) if square else 1.0 for square in squares]))


def is_image(field: Field) -> bool:
    """Whether it is of pixels, (H, W, C), which are divided by 255 before all else."""
    return field.dtype == "uint8" and len(field.shape) == 3
