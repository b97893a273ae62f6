"""The gradient noise scale: how large a batch still pays, measured from gradients that are there anyway."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hvdtrain.core.metrics import Sums

KEYS = ("excess", "excess_inv", "big", "big_inv", "steps")  # in Learner.step's sums; added up over ranks and steps


def shares_of_keys(own: Any, whole: Any, count: int, batch: int, ranks: int) -> Sums:
    """One rank's part of KEYS in one step; device scalars stay such.

    own: squared norm of the rank's part of the gradient, the sum over its `count` samples divided by `batch`, the samples of all ranks
    whole: squared norm of the mean gradient over the batch
    A rank without samples says nothing of the excess.
    """
    excess = {"excess": own * (batch / count) ** 2 - whole, "excess_inv": 1.0 / count - 1.0 / batch} if count else {}
    return {"excess": 0.0, "excess_inv": 0.0, **excess, "big": whole / ranks, "big_inv": 1.0 / batch / ranks, "steps": 1.0 / ranks}


@dataclass
class NoiseScale:
    """Smooths two estimates and divides them: B_noise = S / |G|^2 (McCandlish et al. 2018, arXiv:1812.06162, eq. 2.9 and appendix A.1).

    A mean gradient over b samples has E ||g||^2 = |G|^2 + S / b. So the squared norm of a rank's own mean gradient over b samples
    exceeds that of the whole batch's, over B, by S (1 / b - 1 / B) on average: S is the sum of the one over ranks and steps, divided by
    the sum of the other, whatever the shares and however the batch grows. |G|^2 and S are smoothed apart: their ratio is biased.
    """

    decay: float = 0.9  # of the moving averages, for each reading
    signal: float = 0.0  # |G|^2, moving sum over steps
    noise: float = 0.0  # S, moving sum over steps

    def read(self, sums: Sums) -> dict[str, float]:
        """Takes the sums over some steps and all ranks; gives {"noise_scale": samples}, NaN while |G|^2 is not above 0.

        Of sums without KEYS it gives nothing: nothing was measured.
        """
        if not set(KEYS) <= sums.keys():
            return {}
        excess, excess_inv, big, big_inv, steps = (sums[key] for key in KEYS)
        if excess_inv and math.isfinite(excess) and math.isfinite(big):  # else each step's samples were all one rank's
            noise = excess / excess_inv  # S
            self.noise = self.decay * self.noise + noise * steps
            self.signal = self.decay * self.signal + big - noise * big_inv  # |G|^2 times the number of steps
        return {"noise_scale": self.value}

    @property
    def value(self) -> float:
        return self.noise / self.signal if self.signal > 0 else math.nan
