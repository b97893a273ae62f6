"""The section norm: which samples batch norm takes its statistics from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class NormConfig(Section):
    """Statistics of the model's batch norm layers (framework=torch or jax)."""

    section = "norm"
    kind: Literal["batch", "ghost", "sync"] = Field(
        default="batch",
        description="which samples the statistics of batch norm come from; batch: one forward "
        "pass of one rank; ghost: groups of norm.ghost samples within it; sync: "
        "the samples of all ranks",
    )
    ghost: int = Field(default=128, ge=1, le=10**9, description="samples in a ghost batch")
    statistics: Literal["averaged", "sequential"] = Field(
        default="averaged",
        description="how the running statistics of ghost batches are updated; averaged: once, "
        "with the mean over the ghost batches; sequential: once per ghost batch, "
        "as in Hoffer's code",
    )
