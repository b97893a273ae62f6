"""Batch size growth: the global batch as a function of epochs done (Smith et al. 2017, arXiv:1711.00489)."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True)
class Growth:
    """`first` samples, and from epoch at[i] on to[i]: the step that starts at at[i] has the new batch."""

    first: int
    at: tuple[float, ...] = ()
    to: tuple[int, ...] = ()

    def __call__(self, epochs: float) -> int:
        changes = bisect.bisect_right(self.at, epochs)
        return self.to[changes - 1] if changes else self.first


def from_decays(first: int, milestones: tuple[float, ...], gamma: float, largest: int) -> Growth:
    """The growth that takes the place of decays: at each milestone the batch grows 1 / gamma times, rounded, and `largest` at most.

    Smith et al. 2017, section 3: a decay of the rate and a growth of the batch by the same factor lower the noise lr N / B alike.
    What the batch cannot take any more is left to the rate.
    """
    batches: list[int] = []
    for _ in milestones:
        batches.append(round(min(float(largest), (batches or [first])[-1] / gamma)))
    return Growth(first, milestones, tuple(batches))
