"""Batch size growth: the global batch as a function of epochs done (Smith et al. 2017, arXiv:1711.00489); steps as samples."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


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


class BatchPhase(NamedTuple):
    """Consecutive steps with the same global batch."""

    batch: int
    first_step: int  # steps done before the first of them
    samples: int  # read before the first of them
    steps: float  # a whole number, infinity for the last phase


def batches_instead_of_decays(first: int, milestones: int, gamma: float, largest: int) -> tuple[int, ...]:
    """At each of so many milestones, where a schedule would multiply the rate by gamma, the batch grows 1 / gamma times, up to `largest`.

    Smith et al. 2017, section 3: a decay of the rate and a growth of the batch by the same factor lower the noise lr N / B alike.
    Beyond `largest` the rate decays instead.
    """
    batches: list[int] = []
    for _ in range(milestones):
        batch = batches[-1] if batches else first
        batches.append(round(min(float(largest), batch / gamma)))
    return tuple(batches)


def batch_phases(growth: Growth, dataset: int) -> Iterator[BatchPhase]:
    """All steps, without a loop over them: the batch changes at a few epochs only."""
    step = samples = 0
    while True:
        batch = growth(samples / dataset)
        change = next((epoch for epoch in growth.at if epoch > samples / dataset), math.inf)
        steps = steps_until(change, samples, batch, dataset)
        yield BatchPhase(batch, step, samples, steps)
        if steps == math.inf:
            return
        step += int(steps)
        samples += int(steps) * batch


def samples_after(steps: float, growth: Growth, dataset: int) -> float:
    """Samples of the first `steps` steps; a fraction of a step has that fraction of its samples. A whole number for whole steps."""
    phase = next(phase for phase in batch_phases(growth, dataset) if steps <= phase.first_step + phase.steps)
    return phase.samples + (steps - phase.first_step) * phase.batch


def steps_before(epoch: float, growth: Growth, dataset: int) -> float:
    """Steps that come before the first that starts at `epoch` or later; infinity as steps_until()."""
    for phase in batch_phases(growth, dataset):
        steps = steps_until(epoch, phase.samples, phase.batch, dataset)
        if steps <= phase.steps:
            break
    return phase.first_step + steps


def steps_until(epoch: float, samples: int, batch: int, dataset: int) -> float:
    """How many steps come before the first that starts at `epoch` or later; infinity where that is longer than any job.

    Rounded as Progress.epochs rounds: the estimate is corrected by the same division.
    """
    estimate = (epoch * dataset - samples) / batch
    if not estimate < 2**52:
        return math.inf
    steps = max(0, math.ceil(estimate))
    while steps and (samples + (steps - 1) * batch) / dataset >= epoch:
        steps -= 1
    while (samples + steps * batch) / dataset < epoch:
        steps += 1
    return steps
