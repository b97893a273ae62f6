"""Several data sets mixed by weight: which set and which of its samples a position of the job has,
as a function of seed and position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvdtrain.core.progress import fold
from hvdtrain.data.field import Field
from hvdtrain.data.sampler import KEYED_VERSION, Positions, permuted
from hvdtrain.data.source import Source, check_indices
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

MOST_PERIOD = 2**16  # positions after which the pattern of sets repeats; bounds its memory
_SETS = 0x6D69787475726573  # a stream of counters


class Pattern(NamedTuple):
    """The sets of consecutive positions; it repeats after as many positions as it has."""

    sets: np.ndarray  # int64 (period,): the set of each position
    ordinals: np.ndarray  # int64 (period,): how many earlier positions of the period have this set


def parts_of_period(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns how many positions of a period each set has. They have the proportions of the
    weights, exactly if the period is at most MOST_PERIOD, else to one position."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MOST_PERIOD:
        return tuple(int(share * period) for share in shares)
    counts = [max(1, int(share * MOST_PERIOD)) for share in shares]
    errors = [share * MOST_PERIOD - count for share, count in zip(shares, counts, strict=True)]
    by_error = sorted(range(len(shares)), key=lambda each: (-errors[each], each))
    for each in by_error[: max(0, MOST_PERIOD - sum(counts))]:
        counts[each] += 1
    return tuple(counts)


def pattern_of(parts: Sequence[int]) -> Pattern:
    """Returns a pattern with parts[i] positions of set i. Of any n first positions of the endless
    pattern, the set has n parts[i] / period, to less than one position.

    The chairman assignment of Tijdeman (1980, Discrete Mathematics 32, p. 323): among the sets that
    are at least 1 / (2 K - 2) behind, the one that must come first. Numbers are multiplied by (2 K
    - 2) period, so they are exact.
    """
    share = np.array(parts, np.int64)
    period = int(share.sum())
    if len(parts) == 1:
        return Pattern(np.zeros(period, np.int64), np.arange(period))
    scale = 2 * len(parts) - 2
    counts = np.zeros(len(parts), np.int64)
    sets = np.empty(period, np.int64)
    ordinals = np.empty(period, np.int64)
    for place in range(period):
        behind = scale * ((place + 1) * share - period * counts)
        slack = ((scale - 1) * period - behind) / share
        chosen = int(np.where(behind >= period, slack, np.inf).argmin())
        sets[place] = chosen
        ordinals[place] = counts[chosen]
        counts[chosen] += 1
    return Pattern(sets, ordinals)


@dataclass(frozen=True, eq=False)
class MixtureOrder:
    """The order of a mixture's samples, which are those of the first set, then of the second, ...

    Each set has its own endless stream of epochs, each in another order. The pattern says from
    which stream a position takes the next sample.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # samples of each set
    parts: tuple[int, ...]  # positions of each set in a period

    @cached_property
    def _pattern(self) -> Pattern:
        return pattern_of(self.parts)

    def positions(self, start: int, count: int, dataset: int, seed: int) -> Positions:
        assert sum(self.sizes) == dataset, (self.sizes, dataset)
        places = np.arange(start, start + count, dtype=np.int64)
        period = len(self._pattern.sets)
        sets = self._pattern.sets[places % period]
        reads = places // period * np.array(self.parts)[sets]
        reads += self._pattern.ordinals[places % period]  # samples of this set before this one
        samples = np.empty(count, np.int64)
        first = 0
        for number, size in enumerate(self.sizes):
            is_of_set = sets == number
            samples[is_of_set] = first + _of_stream(reads[is_of_set], size, number, seed)
            first += size
        return Positions(samples, places // dataset)

    @property
    def facts(self) -> dict[str, str]:
        shares = (f"{name} {part}" for name, part in zip(self.names, self.parts, strict=True))
        return {"mixture": f"{', '.join(shares)} ({KEYED_VERSION})"}

    def words(self, samples: int) -> str:
        period = sum(self.parts)
        epochs = (
            f"{samples * part / period / size:.2f} of {name}"
            for name, part, size in zip(self.names, self.parts, self.sizes, strict=True)
        )
        return f"mixed by data.mixture: the job reads epochs of each set, {', '.join(epochs)}"


def _of_stream(reads: np.ndarray, size: int, number: int, seed: int) -> np.ndarray:
    """Returns the samples at these places of the stream of a set, int64 (m,)."""
    samples = np.empty(len(reads), np.int64)
    epochs = reads // size
    for epoch in np.unique(epochs).tolist():
        is_in = epochs == epoch
        samples[is_in] = permuted(reads[is_in] % size, size, fold(seed, _SETS, number), epoch)
    return samples


@dataclass(frozen=True, eq=False)
class Mixture(Source):
    """The samples of several sets, one set after the other; `order` mixes them for training."""

    sets: tuple[Source, ...]
    names: tuple[str, ...]
    parts: tuple[int, ...]  # positions of each set in a period

    @cached_property
    def _edges(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.sets)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._edges[-1])

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.sets[0].fields

    def read(self, indices: np.ndarray) -> Batch:
        check_indices(indices, len(self))
        numbers = np.searchsorted(self._edges, indices, "right") - 1
        rows = {number: np.flatnonzero(numbers == number) for number in np.unique(numbers).tolist()}
        found = {
            number: self.sets[number].read(indices[of_set] - self._edges[number])
            for number, of_set in rows.items()
        }
        if len(found) <= 1:
            return next(iter(found.values())) if found else self.sets[0].read(indices)
        return {name: self._joined(name, len(indices), rows, found) for name in self.fields}

    def _joined(
        self,
        name: str,
        samples: int,
        rows: Mapping[int, np.ndarray],
        found: Mapping[int, Batch],
    ) -> np.ndarray:
        """Returns a field of all samples, padded to the longest one."""
        padding = self.fields[name].padding
        arrays = [batch[name] for batch in found.values()]
        length = max(array.shape[1] for array in arrays)
        joined = np.full((samples, length), padding.value if padding else 0, arrays[0].dtype)
        for of_set, array in zip(rows.values(), arrays, strict=True):
            joined[of_set, : array.shape[1]] = array
        return joined

    @property
    def order(self) -> MixtureOrder:
        sizes = tuple(map(len, self.sets))
        if 0 in sizes:
            raise UserError(
                f"no sample of {self.names[sizes.index(0)]} is left to train on",
                "data.mixture",
                "a larger data.share, a smaller data.val_share, or leave the set out",
            )
        return MixtureOrder(self.names, sizes, self.parts)

    def each_part(self, change: Callable[[Source, str, int], Source]) -> Mixture:
        firsts = self._edges.tolist()
        changed = [
            change(part, name, first)
            for part, name, first in zip(self.sets, self.names, firsts, strict=False)
        ]
        return replace(self, sets=tuple(changed))

    def with_bounds(self, longest: Mapping[str, int], values: Mapping[str, int]) -> Mixture:
        return replace(self, sets=tuple(part.with_bounds(longest, values) for part in self.sets))

    def known_lengths(self, name: str) -> np.ndarray | None:
        lengths = [part.known_lengths(name) for part in self.sets]
        known = [one for one in lengths if one is not None]
        return np.concatenate(known) if len(known) == len(lengths) else None

    @property
    def reads_from_memory(self) -> bool:
        return all(part.reads_from_memory for part in self.sets)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for part in self.sets for note in part.notes)

    def digests(self, seed: int) -> dict[str, str]:
        return self.identity()

    def identity(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for part, name in zip(self.sets, self.names, strict=True):
            identity = part.identity()
            tokenizer = identity.pop("tokenizer", None)
            found |= {} if tokenizer is None else {"tokenizer": tokenizer}
            found |= {f"{name}: {what}": value for what, value in identity.items()}
        return found
