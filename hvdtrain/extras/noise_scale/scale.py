"""The noise scale of gradients, from squared norms that ranks measure in each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hvdtrain.core.metrics import NOISE_SCALE_KEYS, Sums

# "module:function" of framework=torch that creates its StepAddition
ADDITION = "hvdtrain.extras.noise_scale.meter:addition"


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
        return self.fields

    @property
    def fields(self) -> dict[str, float]:
        """Returns the fields of an event."""
        return {"noise_scale": self.value}

    @property
    def value(self) -> float:
        """Returns B_noise in samples; NaN while |G|^2 is not above 0."""
        return self.noise / self.signal if self.signal > 0 else math.nan
