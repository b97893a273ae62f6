"""The keys parallel.tensor and parallel.sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hvdtrain.config.sections.section import Owners, Section

if TYPE_CHECKING:  # the section that has these keys: super() is its class
    from hvdtrain.config.sections.parallel import ParallelConfig as Parallel
else:
    Parallel = Section


class TensorKeys(Parallel):
    """How each layer of a model is divided among ranks."""

    section = "parallel"
    dividing = ("parallel.tensor",)
    owners: ClassVar[Owners] = {"parallel.sequence": ("parallel.tensor", 1)}
    tensor: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="number of ranks that compute each layer together, each with part of its "
        "neurons and attention heads (Shoeybi 2019, arXiv:1909.08053). These "
        "ranks read the same samples and exchange activations in every layer, so "
        "keep them within a host. For models with a tensor plan: gpt, mlp",
    )
    sequence: bool = Field(
        default=False,
        description="with parallel.tensor: in norms, dropout and residual connections each "
        "rank computes only its part of the positions, instead of all of them "
        "(sequence parallelism: Korthikanti 2022, arXiv:2205.05198); needs less "
        "memory for activations, same results. For models whose plan supports it: "
        "gpt",
    )

    @property
    def axes(self) -> dict[str, int]:
        return {**super().axes, "tensor": self.tensor}

    @property
    def part_ranks(self) -> int:
        return self.tensor

    @property
    def divides_positions(self) -> bool:
        return self.sequence


KEYS = (TensorKeys,)
