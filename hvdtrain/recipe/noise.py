"""The noise that a recipe adds to gradients."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.progress import fold

_STREAM = 0x5EED0001  # a stream of counters that dropout and shuffles do not use


def sample_weights(seed: int, step: int, samples: np.ndarray, deviation: float) -> np.ndarray:
    """Draws z ~ N(1, deviation^2), float64 (n,), for samples int64 (n,) (Hoffer et al. 2017,
    arXiv:1705.08741, appendix A).

    It is a pure function of (seed, step, sample), so it does not depend on the rank that reads the
    sample.

    Weighting each sample's loss by z leaves the expected mean gradient unchanged and multiplies its
    covariance by 1 + deviation^2. The Box-Muller transform of two counters is equal on every
    platform up to the rounding of log and cos.
    """
    keys = samples.astype(np.uint64)
    first, second = (_uniform(fold(seed, _STREAM + half, step, keys)) for half in (0, 1))
    return 1.0 + deviation * np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)


def noise_variance(eta: float, step: int) -> float:
    """Returns the variance of annealed Gaussian noise, eta / (1 + step)^0.55 (Neelakantan et al.
    2015, arXiv:1511.06807, eq. 1). step: updates done."""
    return float(eta / (1.0 + step) ** 0.55)


def _uniform(bits: np.ndarray) -> np.ndarray:
    """Converts 64 random bits, uint64, to float64 in (0, 1]."""
    return ((bits >> np.uint64(11)).astype(np.float64) + 1.0) / 2.0**53
