"""The keys servers.*, and the values derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from hvdtrain.config.sections.section import Section


class ServersConfig(Section):
    """Parameter servers: some ranks hold and update the weights, the others compute gradients
    without waiting for each other."""

    section = "servers"
    behind = "shard"
    count: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="number of parameter servers: ranks that each have part of the weights "
        "and update it; the other ranks are workers, which fetch weights and send "
        "gradients (Li 2014, OSDI); 0: none, every rank computes gradients and "
        "updates. framework=torch on the mpi and torchdist engines",
    )
    bound: Annotated[int, Field(ge=0, le=10**6)] | Literal["none"] = Field(
        default=0,
        description="largest staleness: how many updates by others may come between a "
        "worker's fetch of the weights and the update from its gradient; 0: every "
        "update waits for a gradient from each worker, as without servers; s: a "
        "step belongs to one worker, and waits if it would leave another worker "
        "more than s updates behind (Ho 2013, NIPS); none: no worker waits",
    )
    correct: Literal["none", "scale", "delay_compensation"] = Field(
        default="none",
        description="correction of stale gradients; none: none; scale: the learning rate is "
        "divided by the staleness (Zhang 2016, arXiv:1511.05950); "
        "delay_compensation: a second-order term is added (Zheng 2017, "
        "arXiv:1609.08326)",
    )
    compensation: float = Field(
        default=0.04,
        ge=0,
        le=1e6,
        description="factor of the term of servers.correct=delay_compensation, lambda in the paper",
    )
    log: bool = Field(
        default=False,
        description="write RUN/updates.bin with 8 bytes per update, from which `hvdtrain "
        "replay RUN` recomputes the same weights",
    )

    def readers_of(self, ranks: int) -> int:
        if not self.count:
            return ranks
        return 1 if self.is_asynchronous else ranks - self.count

    def first_reader_of(self, ranks: int) -> int:
        """Returns the first worker. After a loss, fewer ranks than servers may be left; then all
        are servers, which write the state."""
        return min(self.count, ranks)

    @property
    def needed_of_engine(self) -> frozenset[str]:
        return frozenset({"p2p"} if self.count else ())

    def why_over(self, lost: Sequence[int], left: int) -> str:
        if any(rank < self.count for rank in lost):
            return "a server is lost"
        return "no worker is left" if 0 < self.count >= left else ""

    @property
    def is_asynchronous(self) -> bool:
        """Whether a single worker makes a step."""
        return self.count > 0 and self.bound != 0

    @property
    def most_stale(self) -> int | None:
        """Returns the bound of staleness; None if there is none."""
        return None if self.bound == "none" else self.bound


KEYS = (ServersConfig,)
