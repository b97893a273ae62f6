"""Gradient noise: the measured noise scale, up to which larger batches save steps, and the noise
that a recipe adds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import fold

# keys in the sums of Learner.step(), which are added over ranks and steps
NOISE_SCALE_KEYS = (
    "excess",
    "excess_inv",
    "big",
    "big_inv",
    "steps",
)
_STREAM = 0x5EED0001  # a stream of counters that dropout and shuffles do not use


def noise_sums(local_square: Any, global_square: Any, count: int, batch: int, ranks: int) -> Sums:
    """Returns one rank's summands of NOISE_SCALE_KEYS in one step, as device scalars on the device
    of the squares.

    local_square: squared norm of the rank's part of the gradient: the sum over its `count` samples,
        divided by `batch`, the samples of all ranks
    global_square: squared norm of the mean gradient over the batch

    A rank without samples adds 0 to the excess.
    """
    sums = {
        "excess": 0.0,
        "excess_inv": 0.0,
        "big": global_square / ranks,
        "big_inv": 1.0 / batch / ranks,
        "steps": 1.0 / ranks,
    }
    if count:
        sums["excess"] = local_square * (batch / count) ** 2 - global_square
        sums["excess_inv"] = 1.0 / count - 1.0 / batch
    return sums


@dataclass
class NoiseScale:
    """Smooths two estimates and divides them: B_noise = S / |G|^2 (McCandlish et al. 2018,
    arXiv:1812.06162, eq. 2.9 and appendix A.1).

    A mean gradient over b samples has E ||g||^2 = |G|^2 + S / b. So the squared norm of a rank's
    mean gradient over b samples exceeds the squared norm for the global batch of B samples by S (1
    / b - 1 / B) on average. S is the sum of these excesses over ranks and steps divided by the sum
    of (1 / b - 1 / B). This holds for any shares of the ranks and any growth of the batch. |G|^2
    and S are smoothed separately, because their ratio is biased.
    """

    decay: float = 0.9  # decay of the moving sums at each update
    signal: float = 0.0  # |G|^2, moving sum over steps
    noise: float = 0.0  # S, moving sum over steps

    def update(self, sums: Sums) -> dict[str, float]:
        """Adds the sums over some steps and all ranks; returns {"noise_scale": samples}, NaN while
        |G|^2 is not above 0.

        Returns {} if the sums lack NOISE_SCALE_KEYS, because nothing was measured.
        """
        if not set(NOISE_SCALE_KEYS) <= sums.keys():
            return {}
        excess, excess_inv, big, big_inv, steps = (sums[key] for key in NOISE_SCALE_KEYS)
        if (
            excess_inv and math.isfinite(excess) and math.isfinite(big)
        ):  # excess_inv is 0 if all samples of each step were on one rank
            noise = excess / excess_inv  # S
            self.noise = self.decay * self.noise + noise * steps
            # |G|^2 times the number of steps
            self.signal = self.decay * self.signal + big - noise * big_inv
        return self.fields(is_measured=True)

    def fields(self, *, is_measured: bool) -> dict[str, float]:
        """Returns the fields of an event: none if nothing is measured."""
        return {"noise_scale": self.value} if is_measured else {}

    @property
    def value(self) -> float:
        """Returns B_noise in samples; NaN while |G|^2 is not above 0."""
        return self.noise / self.signal if self.signal > 0 else math.nan


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
