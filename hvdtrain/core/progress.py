"""How far a job is, in samples and steps, and every number of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Hyper(NamedTuple):
    """Every number of one step."""

    lr: float
    momentum: float  # the first beta of Adam and its kin
    weight_decay: float
    batch: int  # samples over all ranks
    step: int = 0  # updates done before this one
    noise: float = 0.0  # variance of the noise added to each number of the mean gradient
    sample_noise: float = 0.0  # standard deviation of the random weight, of mean 1, of each sample's loss


@dataclass(frozen=True)
class Progress:
    """Where a job stands. With the seed it is all that a resume needs, beside the arrays."""

    dataset: int  # samples in one epoch
    total: int  # samples in the whole job
    step: int = 0
    samples: int = 0

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return self.samples // self.dataset

    @property
    def epochs(self) -> float:
        """Epochs done, with the fraction."""
        return self.samples / self.dataset

    @property
    def done(self) -> bool:
        return self.samples >= self.total

    def advance(self, batch: int) -> Progress:
        return replace(self, step=self.step + 1, samples=self.samples + batch)
