"""The section checkpoint: when checkpoints are written, and which are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class CheckpointConfig(Section):
    """When rank 0 writes checkpoints, besides after each evaluation and at the end of the job."""

    section = "checkpoint"
    every_steps: int | None = Field(
        default=None, ge=1, le=10**15, description="steps between checkpoints"
    )
    every_minutes: float | None = Field(
        default=10.0,
        ge=0,
        le=1e9,
        description="longest time between checkpoints in minutes; they are written at the "
        "next sync point (log.every_steps)",
    )
    every: Literal["auto"] | None = Field(
        default=None,
        description="auto: choose the interval between checkpoints that costs least (Young "
        "1974, Daly 2006), from the time that a checkpoint takes and "
        "guard.mtbf_hours; at most every_minutes, at least 10 s and 10 times the "
        "time of a checkpoint",
    )
    keep_last: int = Field(
        default=2,
        ge=1,
        le=10**9,
        description="number of newest checkpoints to keep in the run folder",
    )
    keep_best: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="number of best checkpoints to keep as well, by the task's objective "
        "(validation accuracy)",
    )
