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
        description="batch: statistics of one rank's forward pass; ghost: of each `ghost` samples "
        "of it; sync: of all ranks' samples",
    )
    ghost: int = Field(default=128, ge=1, le=10**9, description="samples in a ghost batch")
    statistics: Literal["averaged", "sequential"] = Field(
        default="averaged",
        description="running statistics of ghost batches: averaged: one update by their mean; "
        "sequential: one update by each, as in Hoffer's code",
    )
