"""What an evaluation changes in the state of training: the best value, and the targets that were reached for the first time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums, reaches
from hvdtrain.tasks.task import Task, objective
from hvdtrain.training.progress.event_fields import job_energy
from hvdtrain.training.progress.train_state import Reached, TrainState


def after_evaluation(
    config: Config, task: Task, now: TrainState, val: Sums, seconds: float, energy_kinds: Collection[str]
) -> tuple[TrainState, list[Reached]]:
    """The state after the evaluation with the sums `val`, and the targets of log.targets and stop.target that it reached first.

    A target that an earlier evaluation was as good as was reached at a time that is not known, before a resume added it: it is left out.
    """
    after = now.after_evaluation(objective(task).of(val), config.stop.target, seconds, config.stop.min_delta)
    targets = {target for target in (*config.log.targets, config.stop.target) if target is not None}
    open_targets = targets - {past.target for past in now.reached}
    joules = job_energy(after, energy_kinds)
    reached = [
        Reached(
            target=target,
            value=after.last,
            seconds=round(seconds, 3),
            epochs=after.progress.epochs,
            images=after.progress.samples,
            joules=sum(joules.values()) if joules else None,
        )
        for target in sorted(open_targets, reverse=now.better == "min")
        if reaches(after.last, target, now.better) and not reaches(now.best, target, now.better)
    ]
    return replace(after, reached=(*after.reached, *reached)), reached
