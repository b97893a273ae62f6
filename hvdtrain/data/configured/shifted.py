"""data.shift: targets that are the samples some steps later, as in a forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.data.around_source import AroundSource, where_of
from hvdtrain.data.declared import CheckedSource
from hvdtrain.data.field import Channels, Field
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import Foresight, NamedArrays, Source
from hvdtrain.data.subset import Subset, subset

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_FIX = "a dict of arrays, or a file of them, in the order of time"


def shifted(source: Source, steps: int) -> Source:
    """Returns the samples i whose y is that of sample i + steps, or its x if there is no y.

    Samples of a split have both in the split. Raises OptionError for other data than arrays, and if
    nothing is left.
    """
    if isinstance(source, Subset):
        both = source.indices[np.isin(source.indices + steps, source.indices)]
        if not len(both):
            what = f"no two samples of a set are {steps:,} apart, as data.shift={steps} needs"
            raise OptionError(what, "shift", "a smaller number, or longer periods in each set")
        return subset(shifted(source.source, steps), both)
    if not isinstance(source, (NamedArrays, CheckedSource)) or "x" not in source.fields:
        what = f"data.shift needs a field x of arrays, but {where_of(source)} has none"
        raise OptionError(what, "shift", _FIX)
    if len(source) <= steps:
        what = f"data.shift={steps} needs more than {len(source):,} samples"
        raise OptionError(what, "shift", "a smaller number")
    target = "y" if "y" in source.fields else "x"
    if isinstance(source, NamedArrays):
        return _of_arrays(source, steps, target)
    return Shifted(source, steps, target)


def _of_arrays(source: NamedArrays, steps: int, target: str) -> NamedArrays:
    arrays = {name: array[:-steps] for name, array in source.arrays.items()}
    arrays["y"] = source.arrays[target][steps:]
    gaps = source.gaps | ({"y"} if target in source.gaps else set())
    values = dict(source.values)
    if target in values:
        values["y"] = values[target]
    return replace(source, arrays=arrays, values=values, gaps=gaps)


@dataclass(frozen=True, eq=False)
class Shifted(AroundSource):
    """A source read from files, with y from the sample `steps` later."""

    source: Source
    steps: int
    target: str  # the field that y is of

    @property
    def fields(self) -> Mapping[str, Field]:
        return {**self.source.fields, "y": self.source.fields[self.target]}

    def __len__(self) -> int:
        return len(self.source) - self.steps

    def read(self, indices: np.ndarray) -> Batch:
        # one read, so that a block with samples of both is decoded once
        batch = self.source.read(np.concatenate([indices, indices + self.steps]))
        count = len(indices)
        first = {name: array[:count] for name, array in batch.items()}
        return {**first, "y": batch[self.target][count:]}

    def known_labels(self) -> np.ndarray | None:
        return None

    def known_stats(
        self, name: str, indices: np.ndarray | None = None, channels: Channels = "last"
    ) -> np.ndarray | None:
        samples = np.arange(len(self)) if indices is None else indices
        if name == "y":
            return self.source.known_stats(self.target, samples + self.steps, channels)
        return self.source.known_stats(name, samples, channels)

    @property
    def foresight(self) -> Foresight | None:
        """None: samples that are announced would be read with others."""
        return None

    def digests(self, seed: int) -> dict[str, str]:
        return self.source.digests(seed) | self._of_steps()

    def identity(self) -> dict[str, str]:
        return self.source.identity() | self._of_steps()

    def _of_steps(self) -> dict[str, str]:
        return {"shift": digest({"steps": np.array([self.steps])})}
