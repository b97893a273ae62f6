"""Random numbers of images as a pure function of (seed, epoch, sample): each use has its own counters."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.seeds import fold

_STREAM = 0xA063E470  # a counter that shuffles, sample weights, dropout and gradient noise do not use


def draw_keys(seed: int, epochs: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """A seed for each sample in its epoch, uint64 (n,), of int64 (n,) both."""
    keys: np.ndarray = fold(seed, _STREAM, epochs.astype(np.uint64), samples.astype(np.uint64))
    return keys


def uniform(keys: np.ndarray, counters: range) -> np.ndarray:
    """uint64 (n,) -> float64 (n, counters), strictly between 0 and 1: (k + 1/2) / 2^52 for 52 random bits k."""
    bits = fold(keys[:, None], np.array(counters, np.uint64))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def integers(uniform_numbers: np.ndarray, limit: int) -> np.ndarray:
    """int64 0 ... limit - 1, with equal probabilities up to limit / 2^52."""
    return (uniform_numbers * limit).astype(np.int64)
