"""The keys parallel.dense and parallel.dense_updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hvdtrain.config.sections.section import Owners, Section

if TYPE_CHECKING:  # the section that has these keys: super() is its class
    from hvdtrain.config.sections.parallel import ParallelConfig as Parallel
else:
    Parallel = Section


class DenseKeys(Parallel):
    """How the dense layers at the end of a model are divided among ranks."""

    section = "parallel"
    behind = "sequence"
    dividing = ("parallel.dense",)
    owners: ClassVar[Owners] = {"parallel.dense_updates": ("parallel.dense", "none")}
    dense: Literal["none", "a", "b", "c"] = Field(
        default="none",
        description="model parallelism for the dense layers at the end of a model, data "
        "parallelism for its convolutions (Krizhevsky 2014, arXiv:1404.5997): "
        "each rank has some of the dense neurons, which it computes for the "
        "samples of all ranks; a: for all samples at once; b: for those of one "
        "rank after another; c: for 1 / ranks of each rank's samples at a time; "
        "none: off. For models with a dense part: alexnet, convnet "
        "(framework=torch)",
    )
    dense_updates: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="updates of the dense part per step with parallel.dense=b or c; the "
        "convolutions have one (variable batch size: Krizhevsky 2014, section "
        "3.2). With 4, each update uses a quarter of the batch (b) or every "
        "fourth sample (c), on any number of ranks, at a quarter of the learning "
        "rate",
    )

    @property
    def cut_by(self) -> str:
        return super().cut_by or ("dense" if self.dense != "none" else "")

    @property
    def highest_stage(self) -> int:
        return super().highest_stage if self.dense == "none" else 2

    @property
    def may_recompute(self) -> bool:
        return super().may_recompute and self.dense == "none"

    @property
    def may_divide_passes(self) -> bool:
        return super().may_divide_passes and self.dense_updates == 1


KEYS = (DenseKeys,)
