"""Gradient noise: a random weight for each sample's loss, the same whatever rank reads it; and how added noise is annealed."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.seeds import fold

_STREAM = 0x5EED0001  # apart from the seeds of dropout and shuffles


def sample_weights(seed: int, step: int, rows: np.ndarray, deviation: float) -> np.ndarray:
    """z ~ N(1, deviation^2), float64 (n,), a pure function of (seed, step, row) (Hoffer et al. 2017, arXiv:1705.08741, appendix A).

    Weighing each sample's loss by z leaves the mean gradient as it is and multiplies its covariance by 1 + deviation^2.
    Box and Muller's transform of two counters: equal on every platform up to rounding of log and cos.
    """
    keys = rows.astype(np.uint64)
    first, second = (_uniform(fold(seed, _STREAM + half, step, keys)) for half in (0, 1))
    return 1.0 + deviation * np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)


def noise_variance(eta: float, step: int) -> float:
    """eta / (1 + step)^0.55, annealed Gaussian noise (Neelakantan et al. 2015, arXiv:1511.06807, eq. 1); step: updates done."""
    return float(eta / (1.0 + step) ** 0.55)


def _uniform(bits: np.ndarray) -> np.ndarray:
    """64 random bits -> (0, 1]."""
    return ((bits >> np.uint64(11)).astype(np.float64) + 1.0) / 2.0**53
