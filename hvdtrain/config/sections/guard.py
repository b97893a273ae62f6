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
        description="time limit of this run: 90 (seconds), 45m, 3.5h, 1:30:00, 2-00:00:00; "
        "the job writes a checkpoint and stops before it, to be resumed; also "
        "--max-time",
    )
    stall_s: float | None = Field(
        default=300.0,
        ge=1,
        le=1e9,
        description="seconds without progress after which the job stops and reports the ranks "
        "that are behind; null: wait forever",
    )
    start_s: float | None = Field(
        default=600.0,
        ge=1,
        le=1e9,
        description="like guard.stall_s, until the first steps are done (start of MPI, "
        "reading data, building, compiling), and for the last checkpoint",
    )
    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="when a loss or gradient is not finite; stop: stop the job; skip: skip "
        "the step; rollback: return to the newest checkpoint and continue with "
        "the data after this step",
    )
    lost: Literal["stop", "shrink", "restart"] = Field(
        default="stop",
        description="when a rank dies; stop: all ranks stop; shrink: the others continue "
        "without it from the last sync point; restart: the others write a "
        "checkpoint of the last sync point and exit with code 84. shrink and "
        "restart need mpirun --with-ft ulfm, or comm.engine=torchdist with a "
        "launcher that does not stop the other ranks (docs/elastic.md)",
    )
    mtbf_hours: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="mean time between failures of the whole job in hours, for "
        "checkpoint.every=auto; null: estimated from the failures in this run so "
        "far, plus an assumed one in 24 hours",
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
        description="steps between comparisons of weights, buffers, optimizer state, learning "
        "rate and step across all ranks; null: never compare",
    )

    @property
    def needed_of_engine(self) -> frozenset[str]:
        return frozenset({"shrink"} if self.lost != "stop" else ())
