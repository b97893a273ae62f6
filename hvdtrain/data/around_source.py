"""Sources that wrap another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdtrain.data.field import Channels, Field
from hvdtrain.data.source import Foresight, Pictures, Source


class AroundSource(Source):
    """Delegates to the wrapped source everything except reading and labels."""

    source: Source

    def read_by(self, workers: int) -> Source:
        return self._around(self.source.read_by(workers))

    def with_bounds(self, longest: Mapping[str, int], values: Mapping[str, int]) -> Source:
        return self._around(self.source.with_bounds(longest, values))

    def _around(self, source: Source) -> Source:
        return replace(self, source=source)  # type: ignore[type-var]  # subclasses are dataclasses

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.source.fields

    def __len__(self) -> int:
        return len(self.source)

    def digests(self, seed: int) -> dict[str, str]:
        return self.source.digests(seed)

    def identity(self) -> dict[str, str]:
        return self.source.identity()

    def known_stats(
        self, name: str, indices: np.ndarray | None = None, channels: Channels = "last"
    ) -> np.ndarray | None:
        return self.source.known_stats(name, indices, channels)

    def known_array(self, name: str) -> np.ndarray | None:
        return self.source.known_array(name)

    def known_lengths(self, name: str) -> np.ndarray | None:
        return self.source.known_lengths(name)

    @property
    def foresight(self) -> Foresight | None:
        return self.source.foresight

    def expect(self, indices: np.ndarray, anew: bool) -> None:
        self.source.expect(indices, anew)

    @property
    def has_encoded_columns(self) -> bool:
        return self.source.has_encoded_columns

    @property
    def reads_from_memory(self) -> bool:
        return self.source.reads_from_memory

    @property
    def reads_any_sample(self) -> bool:
        return self.source.reads_any_sample

    @property
    def reads_in_process(self) -> bool:
        return self.source.reads_in_process

    @property
    def notes(self) -> tuple[str, ...]:
        return self.source.notes

    @property
    def nested_inputs(self) -> tuple[str, ...]:
        return self.source.nested_inputs

    @property
    def hooks(self) -> tuple[Any, ...]:
        return self.source.hooks

    @property
    def pictures(self) -> Pictures | None:
        return self.source.pictures

    @property
    def run_files(self) -> Mapping[str, bytes]:
        return self.source.run_files

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.class_names

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        return self.source.columns


def inner_source(source: Source) -> Source | None:
    """Returns the source that another one wraps or is a part of; None if it reads by itself."""
    inner: Source | None = getattr(source, "source", None)
    return inner


def where_of(source: Source) -> str:
    """Returns the path or name of a source, for messages."""
    inner = inner_source(source)
    return source.where or ("data.name" if inner is None else where_of(inner))
