"""The key comm.gossip_steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from hvdtrain.config.sections.section import Section

if TYPE_CHECKING:  # the section that has this key
    from hvdtrain.config.sections.comm import CommConfig as Comm
else:
    Comm = Section


class GossipKeys(Comm):
    """How ranks exchange weights between two averages over all ranks."""

    section = "comm"
    behind = "local_from"
    gossip_steps: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="gossip: after this many steps a rank averages its weights with one other "
        "rank, at a distance of 1, 2, 4, ... in turn on a ring of the ranks; all ranks average "
        "after comm.local_steps (Gossip-PGA: Chen 2021, arXiv:2105.09080); 0: no gossip",
    )


KEYS = (GossipKeys,)
