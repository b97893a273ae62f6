"""data.shift: targets that are the samples some steps later, as in a forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

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


class SampleTimes(NamedTuple):
    """The time coordinate of samples."""

    values: np.ndarray  # (n,)
    unit: str  # "days"; "" if unknown


def times_of(source: Source, text: str) -> SampleTimes | None:
    """Returns the times of all samples of a file, by the coordinate of the first axis of the array
    `text`; None if the data have none, or have several files."""
    while isinstance(source, Subset):
        source = source.source
    grid = source.known_grid(text)
    if grid is None or not grid.axes:
        return None
    axis = grid.axes[0]
    for one in grid.coordinates:
        is_number = one.values.dtype.kind in "iuf" and np.isfinite(one.values).all()
        if one.name == axis and one.axes == (axis,) and is_number:
            unit = f"{one.attributes.get('units', '')}".partition(" ")[0]
            return SampleTimes(one.values.astype(np.float64), unit)
    return None


def shifted(source: Source, steps: int, times: SampleTimes | None = None) -> Source:
    """Returns the samples i whose y is that of sample i + steps, or its x if there is no y.

    Samples of a split have both in the split. Leaves out samples whose y would be at an unusual
    time, because times are missing between them. Raises OptionError for other data than arrays, and
    if nothing is left.
    """
    if isinstance(source, Subset):
        both = source.indices[np.isin(source.indices + steps, source.indices)]
        if not len(both):
            what = f"no two samples of a set are {steps:,} apart, as data.shift={steps} needs"
            raise OptionError(what, "shift", "a smaller number, or longer periods in each set")
        return _at_usual_times(shifted(source.source, steps), both, steps, times)
    found = _shifted(source, steps)
    return _at_usual_times(found, np.arange(len(found)), steps, times)


def _at_usual_times(
    source: Source, samples: np.ndarray, steps: int, times: SampleTimes | None
) -> Source:
    """Returns these samples, without those whose y is not as much later as that of most."""
    if times is None or len(times.values) != len(source) + steps:
        return source if len(samples) == len(source) else subset(source, samples)
    later = times.values[samples + steps] - times.values[samples]
    usual = float(np.median(later))
    kept = samples[np.isclose(later, usual, rtol=1e-6, atol=0.0)]
    if len(kept) == len(source):
        return source
    if len(kept) < len(samples) and isinstance(source, Shifted):
        left_out = (
            f"data.shift={steps}: {len(samples) - len(kept):,} of {len(samples):,} samples are "
            f"left out, as their targets are not {usual:g} {times.unit}".rstrip()
            + " later"
        )
        source = replace(source, left_out=left_out)
    return subset(source, kept)


def _shifted(source: Source, steps: int) -> Source:
    """Returns all samples that have a later one."""
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
    left_out: str = ""  # a line about samples without a target at the usual time

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.source.notes, *[self.left_out] * bool(self.left_out))

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
