"""A table whose columns of x are encoded, after the encoding has been learned from its training
rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.data.around_source import AroundSource, inner_source
from hvdtrain.data.field import Channels, Field
from hvdtrain.data.input_encoding import FILE, record_of_run
from hvdtrain.data.source import Source, Unfinished
from hvdtrain.data.subset import Subset
from hvdtrain.errors import UserError, short
from hvdtrain.extras.science.columns.encoding import Encoded, Encoding, lines_of_unknown, numbers_of
from hvdtrain.extras.science.columns.learning import learn
from hvdtrain.extras.science.columns.options import ColumnOptions
from hvdtrain.extras.science.columns.raw_table import RawTable
from hvdtrain.extras.science.columns.record import from_json, to_json

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch


@dataclass(frozen=True, eq=False)
class EncodedTable(AroundSource):
    """A table in memory: x from encoded columns, all other fields from another source."""

    source: Source
    table: RawTable
    rows: np.ndarray  # int64 (n,): with data.missing=drop, the rows without a missing cell
    options: ColumnOptions
    where: str
    dtype: str = "float64"
    names_of_y: tuple[str, ...] = ()  # classes, where `source` does not know them
    encoding: Encoding | None = None  # None: nothing is learned yet, and x has no numbers
    encoded: tuple[Encoded, ...] = ()

    def with_encoding(self, encoding: Encoding) -> EncodedTable:
        """Returns the table with encoded columns. Raises UserError with all problems of the
        rows."""
        names = [column.name for column in encoding.columns]
        if sorted(self.table.columns) != sorted(names):
            what = f"x has the columns {short(', '.join(self.table.columns), 200)}"
            fix = f"those of the training set: {short(', '.join(names), 200)}"
            raise UserError(what, self.where, fix)
        table = replace(self.table, columns={name: self.table.columns[name] for name in names})
        encoded = encoding.encode(table, self.rows, self.where, self.options.kinds)
        return replace(self, table=table, encoding=encoding, encoded=tuple(encoded))

    @property
    def has_encoded_columns(self) -> bool:
        return True

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.names_of_y or self.source.class_names

    @property
    def fields(self) -> Mapping[str, Field]:
        features = () if self.encoding is None else self.encoding.features
        return {"x": Field(self.dtype, (len(features),)), **self.source.fields}

    def read(self, indices: np.ndarray) -> Batch:
        x = numbers_of(self.table, self.encoded, indices).astype(self.dtype, copy=False)
        return {"x": x, **self.source.read(indices)}

    def known_labels(self) -> np.ndarray | None:
        return self.source.known_labels()

    def known_stats(
        self, name: str, indices: np.ndarray | None = None, channels: Channels = "last"
    ) -> np.ndarray | None:
        return None if name == "x" else self.source.known_stats(name, indices, channels)

    def digests(self, seed: int) -> dict[str, str]:
        return self.source.digests(seed) | self._of_columns()

    def identity(self) -> dict[str, str]:
        return self.source.identity() | self._of_columns()

    def _of_columns(self) -> dict[str, str]:
        numbers = {f"numbers {place}": one.numbers for place, one in enumerate(self.encoded)}
        rows = {f"rows {name}": column.rows for name, column in self.table.columns.items()}
        return {"columns": digest({**numbers, **rows})}

    @property
    def run_files(self) -> Mapping[str, bytes]:
        own = {} if self.encoding is None else {FILE: to_json(self.encoding)}
        return {**self.source.run_files, **own}

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.source.notes, *self._lines())

    def _lines(self) -> Iterator[str]:
        if self.encoding is None:
            return
        yield from self.encoding.lines()
        if dropped := [name for name, kind in self.options.kinds.items() if kind == "drop"]:
            yield f"not in x: {short(', '.join(dropped), 200)} (data.columns)"
        if without := len(self.table) - len(self.rows):
            yield (
                f"{without:,} of {len(self.table):,} rows are left out, as a cell is empty "
                "(data.missing=drop)"
            )
        yield from lines_of_unknown(self.table, self.encoded, self.rows)


def encoded_table_in(source: Source) -> tuple[EncodedTable, np.ndarray] | None:
    """Returns the table that a source wraps or is a part of, and the rows of the source in it; None
    of other data."""
    if isinstance(source, EncodedTable):
        return source, np.arange(len(source))
    inner = inner_source(source)
    found = None if inner is None else encoded_table_in(inner)
    if found is None or not isinstance(source, Subset):
        return found
    return found[0], found[1][source.indices]


@dataclass(frozen=True, eq=False)
class UnencodedTable(Unfinished):
    """A source with a table that waits for what its training rows say."""

    array = "columns"
    source: Source

    def compute(self) -> np.ndarray:
        """Returns the record of what is learned from these rows, uint8 (bytes,)."""
        found = encoded_table_in(self.source)
        assert found is not None
        table, rows = found
        return _as_array(to_json(learn(table.table, rows, table.options, table.where)))

    def read(self, run: Path) -> np.ndarray:
        content = record_of_run(run)
        if content is None:
            raise UserError("the file is missing", str(run / FILE), "restore it from a copy")
        return _as_array(to_json(from_json(content, str(run / FILE))))

    def finish(self, array: np.ndarray) -> Source:
        return _with_encoding(self.source, from_json(array.tobytes(), FILE))


def _as_array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8).copy()


def _with_encoding(source: Source, encoding: Encoding) -> Source:
    if isinstance(source, EncodedTable):
        return source.with_encoding(encoding)
    inner: Any = inner_source(source)
    return source if inner is None else _around(source, _with_encoding(inner, encoding))


def _around(source: Any, inner: Source) -> Source:
    """Returns a copy of a source that wraps another one."""
    copy: Source = replace(source, source=inner)
    return copy
