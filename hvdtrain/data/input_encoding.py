"""What the columns of a run's table become in the model's input: an extra learns and applies it,
and a run folder keeps it."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvdtrain.core.extras import column_encoder
from hvdtrain.core.folder import Folder
from hvdtrain.data.around_source import where_of
from hvdtrain.data.source import Source, Unfinished
from hvdtrain.errors import UserError

FILE = "columns.json"  # in a run folder
_MOST_FILE_BYTES = 2**24


class InputEncoding(Protocol):
    """What columns of text, dates and missing cells became in training."""

    @property
    def suffixes(self) -> Sequence[str]:
        """The endings of files that read() supports."""

    def read(self, path: Path, options: Mapping[str, Any]) -> np.ndarray:
        """Reads float64 (n, features) of a file. options: of the run's data set. Raises
        UserError."""

    def encode(self, given: Any, classes: Sequence[str], where: str) -> Any:
        """Encodes the frames of x in data that the user gives to a trained model; other data are
        not changed. Raises UserError for a missing column."""

    def to_json(self) -> bytes:
        """Returns the content of FILE."""


class EncodedData(ABC):
    """A user's data whose columns are encoded."""

    @abstractmethod
    def source(self, name: str, where: str) -> Source:
        """See as_source(). Raises UserError."""


def encoding_of_run(run: Path) -> InputEncoding | None:
    """Returns what the columns of a run's table become; None if it was not trained with
    data.columns. Raises UserError if the file is damaged."""
    content = record_of_run(run)
    if content is None:
        return None
    found: InputEncoding = _encoder(str(run / FILE)).read_record(content, str(run / FILE))
    return found


def record_of_run(run: Path) -> bytes | None:
    """Returns the content of FILE; None if there is no such file. Raises UserError."""
    try:
        with Folder.open(run) as folder:
            return folder.read(FILE, _MOST_FILE_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"it cannot be read: {error}", str(run / FILE), "restore it from a copy"
        ) from None


def data_to_encode(given: Any, train: Any, options: Mapping[str, Any], where: str) -> EncodedData:
    """Returns a user's data whose columns are encoded by what those of `train` say. options: of
    tables. Raises UserError if they are not tables."""
    found: EncodedData = _encoder(where).data_to_encode(given, train, options, where)
    return found


def unencoded(source: Source) -> Unfinished:
    """Returns a source with encoded columns that waits for what its training rows say."""
    found: Unfinished = _encoder(where_of(source)).unencoded(source)
    return found


def _encoder(where: str) -> Any:
    """Returns the module of the extra. Raises UserError if this copy does not have it."""
    module = column_encoder()
    if module is None:
        raise UserError(
            "columns of a table are encoded, but this copy of hvdtrain has no extra that does so",
            where,
            "install a copy with all extras; `hvdtrain extras` lists the installed ones",
        )
    return importlib.import_module(module)
