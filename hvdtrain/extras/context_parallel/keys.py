"""The keys parallel.context and parallel.context_by."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hvdtrain.config.sections.section import Owners, Section

if TYPE_CHECKING:  # the section that has these keys: super() is its class
    from hvdtrain.config.sections.parallel import ParallelConfig as Parallel
else:
    Parallel = Section


class ContextKeys(Parallel):
    """How the positions of each sample are divided among ranks."""

    section = "parallel"
    behind = "balance"
    dividing = ("parallel.context",)
    owners: ClassVar[Owners] = {"parallel.context_by": ("parallel.context", 1)}
    context: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="number of ranks that divide the positions of each sequence, also in "
        "attention: each has whole layers, and the activations of its positions. "
        "For sequences whose activations do not fit on a rank. For gpt and models "
        "with context_plan() (framework=torch, task.name=language)",
    )
    context_by: Literal["ring", "ulysses"] = Field(
        default="ring",
        description="how a position attends to those of other ranks; ring: keys and values go "
        "from rank to rank (Liu 2023, arXiv:2310.01889); ulysses: each rank attends "
        "with some of the heads at all positions, and the number of heads is a "
        "multiple of parallel.context (Jacobs 2023, arXiv:2309.14509)",
    )

    @property
    def ranks_of_sample(self) -> int:
        return self.context

    @property
    def needed_of_engine(self) -> frozenset[str]:
        needed = super().needed_of_engine
        return needed | {"p2p"} if self.context > 1 else needed


KEYS = (ContextKeys,)
