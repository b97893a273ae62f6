"""What an evaluation changes in the state of training: the best accuracy, and the targets that were reached for the first time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.training.progress.event_fields import job_energy
from hvdtrain.training.progress.train_state import Reached, TrainState


def after_evaluation(
    config: Config, now: TrainState, val: Sums, seconds: float, energy_kinds: Collection[str]
) -> tuple[TrainState, list[Reached]]:
    """The state after the evaluation with the sums `val`, and the targets of log.targets and stop.target_accuracy that it reached first.

    A target below the best accuracy so far was reached at a time that is not known, before a resume added it: it is left out.
    """
    after = now.after_evaluation(val["right"] / val["count"], config.stop.target_accuracy, seconds)
    targets = {target for target in (*config.log.targets, config.stop.target_accuracy) if target is not None}
    open_targets = targets - {past.target for past in now.reached}
    joules = job_energy(after, energy_kinds)
    reached = [
        Reached(
            target=target,
            val_accuracy=after.accuracy,
            seconds=round(seconds, 3),
            epochs=after.progress.epochs,
            images=after.progress.samples,
            joules=sum(joules.values()) if joules else None,
        )
        for target in sorted(open_targets)
        if after.accuracy >= target and not now.best >= target
    ]
    return replace(after, reached=(*after.reached, *reached)), reached
