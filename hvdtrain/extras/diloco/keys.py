"""The keys comm.outer_lr, comm.outer_momentum, comm.fragments and comm.differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hvdtrain.config.sections.section import Section

if TYPE_CHECKING:  # the section that has these keys
    from hvdtrain.config.sections.comm import CommConfig as Comm
else:
    Comm = Section


class DilocoKeys(Comm):
    """How ranks combine their weights after comm.local_steps."""

    section = "comm"
    behind = "local_from"
    outer_lr: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="learning rate of the outer optimizer, which replaces the mean of the weights "
        "after comm.local_steps by a step from the weights before them (DiLoCo: Douillard 2023, "
        "arXiv:2311.08105; there 0.7); 1 with comm.outer_momentum=0: the mean",
    )
    outer_momentum: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Nesterov momentum of the outer optimizer (0.9 in the paper)",
    )
    fragments: int = Field(
        default=1,
        ge=1,
        le=10**4,
        description="number of parts of the model that ranks exchange at different steps, each "
        "every comm.local_steps (streaming DiLoCo: Douillard 2025, arXiv:2501.18512); 1: all of it "
        "at once",
    )
    differences: Literal["none", "int16"] = Field(
        default="none",
        description="number type in which ranks send how their weights changed; int16: integers of "
        "16 bits, with a common factor for each tensor; what is rounded off is added to the next "
        "difference; none: that of the weights",
    )


KEYS = (DilocoKeys,)
