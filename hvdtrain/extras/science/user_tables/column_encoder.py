"""Encodes the columns of frames and files for the rest of hvdtrain (data/input_encoding.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.source import Source
from hvdtrain.extras.science.columns.encoded_table import UnencodedTable
from hvdtrain.extras.science.columns.encoding import Encoding
from hvdtrain.extras.science.columns.options import column_options
from hvdtrain.extras.science.columns.record import from_json, to_json
from hvdtrain.extras.science.user_tables.encoded_frame import (
    FrameToEncode,
    frame_to_encode,
    with_encoded_x,
)
from hvdtrain.extras.science.user_tables.predicted_table import read_encoded


@dataclass(frozen=True)
class EncodingOfRun:
    """The encoding that a run has learned."""

    encoding: Encoding
    suffixes = (".csv", ".tsv", ".parquet", ".pq")

    def read(self, path: Path, options: Mapping[str, Any]) -> np.ndarray:
        return read_encoded(path, options, self.encoding)

    def encode(self, given: Any, classes: Sequence[str], where: str) -> Any:
        return with_encoded_x(given, self.encoding, classes, where)

    def to_json(self) -> bytes:
        return to_json(self.encoding)


def read_record(content: bytes, where: str) -> EncodingOfRun:
    """Reads the record of a run. Raises UserError if it is damaged."""
    return EncodingOfRun(from_json(content, where))


def data_to_encode(given: Any, train: Any, options: Mapping[str, Any], where: str) -> FrameToEncode:
    """Returns the DataFrame to encode. Raises UserError for wrong options, or if the data are not
    DataFrames with a target."""
    found = column_options(options["columns"], options["missing"], options["rare"])
    assert found is not None, options
    return frame_to_encode(given, train, found, where)


def unencoded(source: Source) -> UnencodedTable:
    """Returns a source that waits for what its training rows say."""
    return UnencodedTable(source)
