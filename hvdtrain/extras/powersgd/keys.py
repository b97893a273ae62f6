"""The key comm.compression_rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from hvdtrain.config.sections.section import Section

if TYPE_CHECKING:  # the section that has this key
    from hvdtrain.config.sections.comm import CommConfig as Comm
else:
    Comm = Section


class PowerSgdKeys(Comm):
    """How gradients are compressed."""

    section = "comm"
    behind = "compression"
    compression_rank: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="rank of the matrices as which gradients are reduced (PowerSGD: Vogels 2019, "
        "arXiv:1905.13727); what a matrix of this rank cannot have is added to the next gradient; "
        "vectors are reduced whole; 0: gradients are not changed",
    )


KEYS = (PowerSgdKeys,)
