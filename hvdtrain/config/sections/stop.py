"""The section stop: when the job ends."""

from __future__ import annotations

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class StopConfig(Section):
    """When the job ends: after `epochs` (or stop.epochs, the same key), stop.steps, stop.time,
    stop.target or stop.patience."""

    section = "stop"
    steps: int | None = Field(
        default=None,
        ge=1,
        le=10**15,
        description="steps of the whole job, over all its runs; schedules use this length if "
        "it is reached before `epochs`",
    )
    time: str | None = Field(
        default=None,
        description="time limit of the whole job, over all its runs: 90 (seconds), 45m, 3.5h, "
        "1:30:00, measured by rank 0's clock at sync points. If only time ends "
        "the job, no schedule can use fractions of its length. guard.max_time "
        "instead stops one run, to be resumed",
    )
    target: float | None = Field(
        default=None,
        ge=-1e30,
        le=1e30,
        description="value of the task's objective at which the job stops; with "
        "task.name=classification the validation accuracy",
    )
    target_for: int = Field(
        default=1,
        ge=1,
        le=10**9,
        description="stop only after this many consecutive evaluations that reach stop.target",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="stop after this many consecutive evaluations without a better value of "
        "the task's objective (validation accuracy)",
    )
    min_delta: float = Field(
        default=0.0,
        ge=0,
        le=1e30,
        description="a value must be better by more than this to reset the count of stop.patience",
    )
    restore_best: bool = Field(
        default=False,
        description="keep the checkpoint of the best evaluation; export, evaluate, predict "
        "and sample use its weights, and a script's model has them at the end of "
        "the job",
    )
