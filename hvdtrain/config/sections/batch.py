"""The section batch: samples per step and per pass."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class BatchConfig(Section):
    """Samples per step."""

    section = "batch"
    size: int = Field(
        default=64,
        ge=1,
        le=10**9,
        description="global batch: samples per step, summed over all ranks",
    )
    per_rank: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="samples per step on each rank; sets batch.size to this value times the "
        "number of ranks at the start of the job",
    )
    micro: Annotated[int, Field(ge=1, le=10**9)] | Literal["auto"] | None = Field(
        default=None,
        description="largest number of samples in one forward pass of a rank (micro-batch); "
        "gradients of the micro-batches of a step are accumulated; auto: the "
        "predicted maximum that fits in memory",
    )
    evaluate: int = Field(
        default=500,
        ge=1,
        le=10**9,
        description="samples in one forward pass of a rank during evaluation",
    )
