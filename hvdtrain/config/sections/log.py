"""The section log: what is logged, and how often."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class LogConfig(Section):
    """What is logged, and how often."""

    section = "log"
    every_steps: int = Field(
        default=10,
        ge=1,
        le=10**9,
        description="steps between sync points, at which all ranks sum metrics, react to "
        "signals and write checkpoints; a sync point waits for the device",
    )
    every_s: float = Field(
        default=10.0,
        ge=0,
        le=1e9,
        description="shortest time in seconds between progress lines within an epoch; a live "
        "display updates once a second",
    )
    display: Literal["auto", "live", "lines"] = Field(
        default="auto",
        description="live: a display that updates in place; lines: plain lines, suited to a "
        "file; auto: live if rank 0 writes to an interactive terminal, otherwise "
        "lines",
    )
    per_rank: bool = Field(
        default=False,
        description="write the times and warnings of each rank to RUN/ranks/rank-00000.log",
    )
    trackers: list[str] = Field(
        default_factory=list,
        description="trackers that record the metrics in addition to RUN/events.jsonl: "
        "tensorboard, mlflow, wandb",
    )
    targets: list[float] = Field(
        default_factory=list,
        description="values of the task's objective (validation accuracy); the time, epochs, "
        "images and joules until each is first reached are reported, as for "
        "stop.target",
    )
    step_times: bool = Field(
        default=False,
        description="write an event per step with the time of each phase and the slowest "
        "rank; costs a small allgather per sync point",
    )
    samples: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="number of images or texts to draw before the first step and at each "
        "evaluation, always from the same random numbers, into RUN/samples and "
        "the report (task.name=language); or of samples whose masks are shown "
        "(task.name=segmentation; default: 4 at the end)",
    )
    noise_scale: bool = Field(
        default=False,
        description="measure and log the gradient noise scale and the critical batch size "
        "that follows from it; requires at least two ranks",
    )

    @property
    def measures_noise(self) -> bool:
        """Whether ranks measure the noise of their gradients."""
        return self.noise_scale
