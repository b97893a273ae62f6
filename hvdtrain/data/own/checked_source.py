"""A source of the user's own class, whose numbers are checked when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.data.source import Field, Source, check_numbers, read_in_epochs, reads_from_memory, reads_in_process

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch


@dataclass(frozen=True, eq=False)
class CheckedSource:
    """The same samples. Reading raises UserError for an integer outside of 0 ... values - 1, and for a number that is not finite."""

    source: Source
    where: str

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.source.fields

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: np.ndarray) -> Batch:
        return self._checked(self.source.read(indices), indices)

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        return self._checked(read_in_epochs(self.source, indices, epochs, seed), indices)

    def digests(self, seed: int) -> dict[str, str]:
        return self.source.digests(seed)

    def identity(self) -> dict[str, str]:
        return self.source.identity()

    @property
    def reads_from_memory(self) -> bool:
        return reads_from_memory(self.source)

    @property
    def reads_in_process(self) -> bool:
        return reads_in_process(self.source)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(getattr(self.source, "notes", ()))

    def _checked(self, batch: Batch, indices: np.ndarray) -> Batch:
        for name, field in self.fields.items():
            check_numbers(name, batch[name], field.values, self.where, indices)
        return batch
