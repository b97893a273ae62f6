"""Files of arrays that a source reads: finds them without importing what reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np

from hvdtrain.data.around_source import inner_source
from hvdtrain.data.source import Source

if TYPE_CHECKING:
    from hvdtrain.data.grid import Grid


class ReadingRanks(NamedTuple):
    """Ranks that compute statistics together."""

    rank: int
    size: int
    # all-reduces a float64 array under a name
    add_up: Callable[[np.ndarray, str], np.ndarray]


class ArrayFiles(Protocol):
    """A source whose reads_array_files is true: it reads files one block at a time."""

    def __len__(self) -> int: ...

    @property
    def rows_of_block(self) -> int | None:
        """The largest number of neighbouring samples that are decoded together; None if each is
        read by itself."""

    @property
    def cache_bytes(self) -> int:
        """At most so many bytes of decoded blocks stay in memory."""

    @property
    def bytes_of_sample(self) -> int: ...

    def decodes_of_block(self, own: bool) -> float:
        """Estimates how often a block is decoded in an epoch of a full shuffle. own: whether each
        rank reads different blocks."""

    def read_field(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Reads one field of samples, in this process."""

    def read_together(self, ranks: ReadingRanks) -> None:
        """From now on, these ranks compute statistics together."""

    def known_grid(self, text: str) -> Grid | None:
        """See Source.known_grid()."""


def name_and_words(text: str) -> tuple[str, str]:
    """Splits `/fields/u[:, 0:3]` of data.fields into `/fields/u` and `:, 0:3`."""
    name, bracket, words = text.partition("[")
    return name.strip(), words.rstrip()[:-1] if bracket and words.rstrip().endswith("]") else words


def array_files_in(source: Source) -> ArrayFiles | None:
    """Returns the files of arrays that a source wraps or is a part of; else None."""
    while not source.reads_array_files:
        inner = inner_source(source)
        if inner is None:
            return None
        source = inner
    return cast("ArrayFiles", source)
