"""The gradient noise scale: how large a batch still pays, measured from gradients that are there anyway."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdtrain.state import Sums

KEYS = ("small", "small_inv", "big", "big_inv", "steps")  # in Learner.step's sums; added up over ranks and steps


@dataclass
class NoiseScale:
    """Smooths two estimates and divides them: B_noise = S / |G|^2 (McCandlish et al. 2018, arXiv:1812.06162, eq. 2.9 and appendix A.1).

    A mean gradient over b samples has E ||g||^2 = |G|^2 + S / b. Two sizes of batch give both: "small" is the mean over ranks of the
    squared norm of a rank's own mean gradient, "big" that of the whole batch's. Shares may be uneven and the batch may grow: what
    enters are the sums of ||g||^2 and of 1 / b over ranks and steps. |G|^2 and S are smoothed apart, since their ratio is biased.
    """

    decay: float = 0.9  # of the moving averages, for each reading
    signal: float = 0.0  # |G|^2, moving sum over steps
    noise: float = 0.0  # S, moving sum over steps

    def read(self, sums: Sums, ranks: int) -> dict[str, float]:
        """Takes the sums over some steps and all ranks; gives {"noise_scale": samples}, NaN while |G|^2 is not above 0.

        Of sums without KEYS it gives nothing: nothing was measured.
        """
        if not set(KEYS) <= sums.keys():
            return {}
        small, small_inv, big, big_inv, steps = (sums[key] for key in KEYS)
        noise = (small / ranks - big) / (small_inv / ranks - big_inv)  # S
        signal = big - noise * big_inv  # |G|^2 times the number of steps
        self.noise = self.decay * self.noise + noise * steps
        self.signal = self.decay * self.signal + signal
        return {"noise_scale": self.value}

    @property
    def value(self) -> float:
        return self.noise / self.signal if self.signal > 0 else math.nan
