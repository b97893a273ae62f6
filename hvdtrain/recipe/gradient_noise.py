"""Gradient noise: a random weight for each sample's loss, and the variance of noise added to the gradient."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.seeds import fold

_STREAM = 0x5EED0001  # a counter that dropout and shuffles do not use


def sample_weights(seed: int, step: int, samples: np.ndarray, deviation: float) -> np.ndarray:
    """z ~ N(1, deviation^2), float64 (n,), for samples int64 (n,) (Hoffer et al. 2017, arXiv:1705.08741, appendix A).

    A pure function of (seed, step, sample): the same on whichever rank reads the sample.

    Weighting each sample's loss by z leaves the expected mean gradient unchanged and multiplies its covariance by 1 + deviation^2.
    Box-Muller transform of two counters: equal on every platform up to the rounding of log and cos.
    """
    keys = samples.astype(np.uint64)
    first, second = (_uniform(fold(seed, _STREAM + half, step, keys)) for half in (0, 1))
    return 1.0 + deviation * np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)


def noise_variance(eta: float, step: int) -> float:
    """eta / (1 + step)^0.55, annealed Gaussian noise (Neelakantan et al. 2015, arXiv:1511.06807, eq. 1); step: updates done."""
    return float(eta / (1.0 + step) ** 0.55)


def _uniform(bits: np.ndarray) -> np.ndarray:
    """64 random bits, uint64 -> float64 in (0, 1]."""
    return ((bits >> np.uint64(11)).astype(np.float64) + 1.0) / 2.0**53
