"""Progress of a job in samples and steps, the hyperparameters of a step, updates of asynchronous
training; seeds computed from such counters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

ENDLESS = 2**53 - 1  # samples of a job without a number of epochs


MOST_STALE = 2**16 - 1  # limit of a record in the log of updates


_MASK = 2**64 - 1


class Hyper(NamedTuple):
    """The hyperparameters of one step."""

    lr: float
    momentum: float  # beta1 in Adam and similar optimizers
    weight_decay: float
    batch: int  # samples over all ranks
    step: int = 0  # updates done before this one
    noise: float = 0.0  # variance of the noise added to each number of the mean gradient
    sample_noise: float = (
        0.0  # standard deviation of the random weight of each sample's loss; its mean is 1
    )
    thaw: tuple[int, ...] = ()  # for each entry of model.thaw: the step from which it is trained
    # with comm.local_steps: ranks reduce the gradient of this step, because it is before
    # comm.local_from
    together: bool = False


@dataclass(frozen=True)
class Progress:
    """Samples and steps done. Together with the seed and the checkpoint's arrays, it is all that a
    resume needs."""

    dataset: int  # samples in one epoch
    total: int  # samples in the job; ENDLESS if something else ends it
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
        """Returns the progress of a job that has no more samples to read."""
        return replace(self, total=self.samples)

    def advance(self, batch: int) -> Progress:
        """Returns the progress after one more step of `batch` samples over all ranks."""
        return replace(self, step=self.step + 1, samples=self.samples + batch)


def fold(*counters: Any) -> Any:
    """Returns a 64-bit seed from counters: fold(seed, step, rank). It is equal on every platform
    and for all library versions.

    Each counter is an int or a uint64 array; with an array, the result is an array with a seed for
    each element. The mixing function is splitmix64's (Steele, Lea, Flood 2014, "Fast splittable
    pseudorandom number generators", fig. 17).
    """
    seed: Any = 0
    for counter in counters:
        seed = _mix(seed ^ _mix(counter + 0x9E3779B97F4A7C15 & _MASK))
    return seed


def _mix(x: Any) -> Any:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


class WorkerUpdate(NamedTuple):
    """One update of the weights from one worker's gradient."""

    ticket: int  # the step whose samples the gradient was computed from
    staleness: int  # updates between the worker's reading of the weights and this one
    worker: int  # its rank


class Outstanding(NamedTuple):
    """A gradient that a worker is computing or has computed, and that is not applied yet."""

    ticket: int
    read: int  # updates included in its weights


class GoOn(NamedTuple):
    """How the surviving ranks continue between two sync points; the same on all of them."""

    version: int  # updates done
    ranks: dict[int, int]  # old rank -> new rank
    # by a worker's new rank: its complete gradient that is not applied yet
    sent_again: dict[int, Outstanding]
    given_again: list[int]  # tickets whose gradient no surviving worker has
    source: str  # where the state came from, for the event "lost"
