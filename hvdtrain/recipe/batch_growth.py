"""Batch size growth: the global batch as a function of epochs done (Smith et al. 2017, arXiv:1711.00489)."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True)
class Growth:
    """`first` samples, and from epoch at[i] on to[i] samples: the step that starts at at[i] has the new batch."""

    first: int
    at: tuple[float, ...] = ()  # epochs, rising
    to: tuple[int, ...] = ()  # samples over all ranks

    def __call__(self, epochs: float) -> int:
        """The global batch of the step that starts after `epochs` epochs."""
        changes = bisect.bisect_right(self.at, epochs)
        return self.to[changes - 1] if changes else self.first


def growth_instead_of_decays(first: int, milestones: tuple[float, ...], gamma: float, largest: int) -> Growth:
    """At each milestone, where a schedule would multiply the rate by gamma, the batch grows 1 / gamma times, rounded, up to `largest`.

    Smith et al. 2017, section 3: a decay of the rate and a growth of the batch by the same factor lower the noise lr N / B alike.
    Beyond `largest` the rate decays instead.
    """
    batches: list[int] = []
    for _ in milestones:
        batch = batches[-1] if batches else first
        batches.append(round(min(float(largest), batch / gamma)))
    return Growth(first, milestones, tuple(batches))
