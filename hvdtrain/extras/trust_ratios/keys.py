"""The key log.trust_ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from hvdtrain.config.sections.section import Section

if TYPE_CHECKING:  # the section that has this key: super() is its class
    from hvdtrain.config.sections.log import LogConfig as Log
else:
    Log = Section


class TrustRatioKeys(Log):
    """The trust ratios of layers."""

    section = "log"
    trust_ratios: bool = Field(
        default=False,
        description="record by which factor optim.name=lars, larc or lamb multiplied the learning "
        "rate of each layer, at every sync point, in the events and the report",
    )


KEYS = (TrustRatioKeys,)
