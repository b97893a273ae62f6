"""The section parallel: how the layers of one model are divided among ranks."""

from __future__ import annotations

import math
from typing import Self

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section
from hvdtrain.core.extras import implementation


@with_keys_of_extras
class ParallelConfig(Section):
    """How the layers of one model are divided among ranks; the rest of the ranks is data
    parallel."""

    section = "parallel"

    @property
    def axes(self) -> dict[str, int]:
        """The number of ranks along each axis of the mesh over which layers are divided."""
        return {}

    @property
    def ranks(self) -> int:
        """The number of ranks that share one model and read the same samples."""
        return math.prod(self.axes.values())

    @property
    def ranks_of_sample(self) -> int:
        """The number of ranks that read the same samples, and compute a part of each with all of
        its layers; they are data parallel otherwise."""
        return 1

    @property
    def part_ranks(self) -> int:
        """The number of ranks that compute each layer together, with a part of it each."""
        return 1

    @property
    def divides_positions(self) -> bool:
        """Whether these ranks divide positions between the layers."""
        return False

    @property
    def pipe_ranks(self) -> int:
        """The number of ranks that have consecutive layers of one model."""
        return 1

    @property
    def stages_of_rank(self) -> int:
        """The number of places in the model from which a rank has consecutive layers."""
        return 1

    @property
    def has_stages(self) -> bool:
        """Whether each rank has only some of the layers."""
        return self.pipe_ranks > 1

    @property
    def more_passes(self) -> int:
        """By how much a step is divided into more passes, so that ranks wait less."""
        return 1

    def with_one_pass(self) -> Self:
        """Returns a copy with which a step is divided only by batch.micro."""
        return self

    def readers_of(self, ranks: int) -> int:
        return ranks // (self.ranks * self.ranks_of_sample)

    def summary(self) -> str:
        """Returns the settings, for people: parallel.AXIS=2; several are joined by x."""
        sizes = reversed(self.axes.items())
        return " x ".join(f"parallel.{name}={size}" for name, size in sizes if size > 1)

    @property
    def cut_by(self) -> str:
        """The key that partitions layers among ranks; empty if every rank has complete layers."""
        return next((name for name, size in self.axes.items() if size > 1), "")

    @property
    def cuts(self) -> bool:
        """Whether parameters and optimizer state are partitioned among ranks."""
        return bool(self.cut_by)

    @property
    def highest_stage(self) -> int:
        """The highest shard.stage that these settings, and this copy of hvdtrain, support."""
        return 2 if implementation("shard.stage=3") is None else 3

    @property
    def may_recompute(self) -> bool:
        """Whether these settings support model.recompute."""
        return True

    @property
    def may_divide_passes(self) -> bool:
        """Whether these settings support batch.micro."""
        return True
