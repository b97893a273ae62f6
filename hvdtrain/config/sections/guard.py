"""The section guard: time limit, stalls, lost ranks and values that are not finite."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class GuardConfig(Section):
    """Time limit, stall detection, and checks of the job's health."""

    section = "guard"
    max_time: str | None = Field(
        default=None,
        description="stop with a checkpoint before the job has run this long: 90 (seconds), 45m, "
        "3.5h, 1:30:00, 2-00:00:00; "
        "also --max-time",
    )
    stall_s: float | None = Field(
        default=300.0,
        ge=1,
        le=1e9,
        description="seconds without progress after which the job ends with a report of the ranks "
        "that are behind; null: wait forever",
    )
    start_s: float | None = Field(
        default=600.0,
        ge=1,
        le=1e9,
        description="the same until the first steps are done (start of MPI, reading data, "
        "building, compiling), and for the last "
        "checkpoint",
    )
    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="when a loss or gradient is not finite: stop the job; skip the step; "
        "or rollback to the newest checkpoint and continue with the data after it",
    )
    lost: Literal["stop", "shrink", "restart"] = Field(
        default="stop",
        description="when a rank dies: stop: all ranks end; shrink: the others go on without it "
        "from the last sync point; restart: the "
        "others write a checkpoint of the last sync point and end with exit code 84. Both need "
        "mpirun --with-ft ulfm, or "
        "comm.engine=torchdist with a launcher that leaves the other ranks alone (docs/elastic.md)",
    )
    mtbf_hours: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="mean time between two faults of the whole job in hours, for "
        "checkpoint.every=auto; null: as seen in this run so far, "
        "and one in 24 hours",
    )
    nonfinite_limit: int = Field(
        default=20,
        ge=0,
        le=10**9,
        description="number of skipped steps or rollbacks after which the job stops",
    )
    equal_steps: int | None = Field(
        default=100,
        ge=1,
        le=10**15,
        description="steps between two comparisons of weights, buffers, optimizer state, lr and "
        "step across all ranks; null: never",
    )

    @property
    def needed_of_engine(self) -> frozenset[str]:
        return frozenset({"shrink"} if self.lost != "stop" else ())
