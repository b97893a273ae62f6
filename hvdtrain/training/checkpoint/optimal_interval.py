"""The optimal time between two checkpoints, as a function of their cost and of the time between
faults."""

from __future__ import annotations

import math


def optimal_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Returns the optimal seconds of training between two checkpoints, if each stops training for
    cost_s and faults are mtbf_s apart on average.

    Young 1974 (Comm. ACM 17(9)): sqrt(2 C M); with the higher order of Daly 2006 (Future Gener.
    Comput. Syst. 22(3), eq. 37), which is M if a checkpoint costs 2 M or more.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s
