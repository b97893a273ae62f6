"""Progress of a job in samples and steps, and the hyperparameters of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

ENDLESS = 2**53 - 1  # samples of a job that has no number of epochs


class Hyper(NamedTuple):
    """The hyperparameters of one step."""

    lr: float
    momentum: float  # the first beta of Adam and optimizers like it
    weight_decay: float
    batch: int  # samples over all ranks
    step: int = 0  # updates done before this one
    noise: float = 0.0  # variance of the noise that is added to each number of the mean gradient
    sample_noise: float = 0.0  # standard deviation of the random weight of each sample's loss; its mean is 1
    together: bool = False  # with comm.local_steps: the ranks reduce the gradient of this step, which comes before comm.local_from


@dataclass(frozen=True)
class Progress:
    """Samples and steps done. Beside the seed and the arrays of the checkpoint it is all that a resume needs."""

    dataset: int  # samples in one epoch
    total: int  # samples in the whole job, ENDLESS where they do not end it
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

    def end_here(self) -> Progress:
        """Progress of a job that has no more samples to read."""
        return replace(self, total=self.samples)

    def advance(self, batch: int) -> Progress:
        """After one more step, of `batch` samples over all ranks."""
        return replace(self, step=self.step + 1, samples=self.samples + batch)
