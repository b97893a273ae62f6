"""The section stop: when the job is done."""

from __future__ import annotations

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class StopConfig(Section):
    """When the job is done: after `epochs` (or stop.epochs, the same key), stop.steps, stop.time,
    stop.target or stop.patience."""

    section = "stop"
    steps: int | None = Field(
        default=None,
        ge=1,
        le=10**15,
        description="steps of the whole job, over all its runs: the length that its schedules "
        "have, where it is reached before `epochs`",
    )
    time: str | None = Field(
        default=None,
        description="time of the whole job, over all its runs, at which it is done: 90 (seconds), "
        "45m, 3.5h, 1:30:00; as the clock of "
        "rank 0 has it at a sync point. Where only time ends the job, no schedule can count "
        "shares of it (guard.max_time stops one run, "
        "to be resumed)",
    )
    target: float | None = Field(
        default=None,
        ge=-1e30,
        le=1e30,
        description="value of the task's objective at which the job stops: validation accuracy, "
        "with task.name=classification",
    )
    target_for: int = Field(
        default=1,
        ge=1,
        le=10**9,
        description="stop only after this many consecutive evaluations at stop.target or better",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="evaluations in a row without a better value of the task's objective "
        "(validation accuracy) after which the job stops",
    )
    min_delta: float = Field(
        default=0.0,
        ge=0,
        le=1e30,
        description="by more than this a value is better than the one that stop.patience counts "
        "from",
    )
    restore_best: bool = Field(
        default=False,
        description="keep the checkpoint of the best evaluation: its weights are those of the "
        "script's model at the end of the job, and of "
        "export, evaluate, predict and sample",
    )
