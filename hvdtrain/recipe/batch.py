"""The global batch: batch.size or batch.per_rank x ranks, and its growth over epochs (Smith et al.
2017, arXiv:1711.00489)."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hvdtrain.config.read import expand
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import COMMAND_LINE, DEFAULT
from hvdtrain.errors import UserError


@dataclass(frozen=True)
class Growth:
    """The batch by epoch: `first` samples, then to[i] samples from epoch at[i] on. The step that
    starts at at[i] has the new batch."""

    first: int
    at: tuple[float, ...] = ()  # epochs, in ascending order
    to: tuple[int, ...] = ()  # samples over all ranks

    def __call__(self, epochs: float) -> int:
        """Returns the global batch of the step that starts after `epochs` epochs."""
        changes = bisect.bisect_right(self.at, epochs)
        return self.to[changes - 1] if changes else self.first


class BatchPhase(NamedTuple):
    """Consecutive steps with the same global batch."""

    batch: int
    first_step: int  # steps done before the phase
    samples: int  # samples read before the phase
    steps: float  # number of steps, infinity for the last phase


def batches_instead_of_decays(
    first: int, milestones: int, gamma: float, largest: int
) -> tuple[int, ...]:
    """Grows the batch by 1 / gamma at each milestone, up to `largest`, instead of multiplying the
    rate by gamma.

    Smith et al. 2017, section 3: decaying the rate and growing the batch by the same factor reduce
    the noise lr N / B equally. Beyond `largest`, the rate decays instead.
    """
    batches: list[int] = []
    for _ in range(milestones):
        batch = batches[-1] if batches else first
        batches.append(round(min(float(largest), batch / gamma)))
    return tuple(batches)


def batch_phases(growth: Growth, dataset: int) -> Iterator[BatchPhase]:
    """Yields all steps in phases, without a loop over steps: the batch changes only at a few
    epochs."""
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
    """Returns the samples of the first `steps` steps; a fraction of a step has that fraction of its
    samples."""
    phase = next(
        phase for phase in batch_phases(growth, dataset) if steps <= phase.first_step + phase.steps
    )
    return phase.samples + (steps - phase.first_step) * phase.batch


def steps_before(epoch: float, growth: Growth, dataset: int) -> float:
    """Returns the number of steps before the first one that starts at `epoch` or later; infinity as
    in steps_until()."""
    for phase in batch_phases(growth, dataset):
        steps = steps_until(epoch, phase.samples, phase.batch, dataset)
        if steps <= phase.steps:
            break
    return phase.first_step + steps


def steps_until(epoch: float, samples: int, batch: int, dataset: int) -> float:
    """Returns the number of steps before the first one that starts at `epoch` or later; infinity if
    that is longer than any job.

    It rounds like Progress.epochs, because it corrects the estimate by the same division.
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


def resolve_batch_size(config: Config, ranks: int) -> Config:
    """Sets batch.size to batch.per_rank x the number of ranks that read different samples, and
    batch.per_rank to None.

    If both keys are set, the command line overrides files. A run folder stores batch.size, and with
    resume=RUN that value overrides batch.per_rank from a file: the job keeps its batch on another
    number of ranks. Raises UserError if both keys are set and neither overrides the other.
    """
    per_rank = config.batch.per_rank
    if per_rank is None:
        return config
    if _key_that_counts(config) == "batch.size":
        return config.replace(batch=config.batch.replace(per_rank=None))
    resolved = config.replace(
        batch=config.batch.replace(size=per_rank * (config.readers(ranks)), per_rank=None)
    )
    return resolved.with_provenance(
        {"batch.size": f"{config.where('batch.per_rank')} x {ranks} ranks{_of_one_model(config)}"}
    )


def _of_one_model(config: Config) -> str:
    """Returns a part of a message: ranks that share a model read the same samples."""
    return f" / {config.parallel.ranks} of one model" if config.parallel.ranks > 1 else ""


def _key_that_counts(config: Config) -> Literal["batch.size", "batch.per_rank"]:
    """Returns which of the two keys sets the global batch, if batch.per_rank is set."""
    size_origin = config.origin("batch.size")
    per_rank_origin = config.origin("batch.per_rank")
    if size_origin == DEFAULT:
        return "batch.per_rank"
    if size_origin == COMMAND_LINE and per_rank_origin != COMMAND_LINE:
        return "batch.size"
    if per_rank_origin == COMMAND_LINE and size_origin != COMMAND_LINE:
        return "batch.per_rank"
    if size_origin != COMMAND_LINE and _is_of_the_resumed_run(config, size_origin):
        return "batch.size"
    raise UserError(
        "batch.size and batch.per_rank are both given",
        config.where("batch.per_rank"),
        "keep one of them",
    )


def _is_of_the_resumed_run(config: Config, origin: str) -> bool:
    """Whether a value was set by the config.yaml of the run that resume=RUN names."""
    return config.resume not in ("auto", "no") and origin.rpartition(":")[0] == str(
        expand(config.resume, "resume") / "config.yaml"
    )
