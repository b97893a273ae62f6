"""Words of other tools, with the key or value that they mean here, for the message about an unknown
key or value. The tables are those of an extra; without it, no word is known."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from hvdtrain.core.extras import archives, data_files, document_files, tables, words
from hvdtrain.errors import short

# suffixes of files that a user's function reads
_TABLES = (".xlsx", ".json", ".npy", ".pt", ".arrow", ".feather")
# suffixes of files -> the data.name that reads them
_STORED = {**tables(), **archives(), **data_files()}


class WordTables(NamedTuple):
    """The tables of words. Keys are in lower case, with _ for -."""

    keys: Mapping[str, str]  # word -> the key, or key=value
    no_keys: Mapping[str, str]  # word -> how to set what no key sets
    values: Mapping[str, Mapping[str, str]]  # key -> word -> the value
    no_values: Mapping[str, Mapping[str, str]]  # key -> word -> what to do instead


@functools.cache
def _words() -> WordTables:
    module = words()
    if module is None:
        return WordTables({}, {}, {}, {})
    of: Any = importlib.import_module(module)
    return WordTables(of.KEYS, of.NO_KEYS, of.VALUES, of.NO_VALUES)


def data_of_path(value: Any) -> str | None:
    """Returns what to write for a path instead of a data set's name: data.name=folder
    data.root=photos; None if it is not a path."""
    path = str(value)
    stored = _STORED.get(os.path.splitext(path.rstrip("/"))[1].lower())
    if stored is not None:
        return f"data.name={stored} data.root={short(path)} (docs/science-data.md)"
    if path.lower().endswith(_TABLES):
        return (
            f"data.name=mydata:load, where load() in mydata.py is yours and reads {short(path)} "
            "(docs/own-data.md)"
        )
    if path.lower().endswith(".txt"):
        return f"data.name=text data.root={short(path)}"
    for end, name in document_files().items():
        if path.lower().endswith(end):
            return f"data.name={name} data.root={short(path)} (docs/data.md)"
    if os.path.isdir(path) or path.startswith((".", "~")) or os.sep in path:
        return f"data.name=folder data.root={short(path)}"
    return None


def right_key(key: str, value: Any = None) -> str | None:
    """Returns the key that another tool's word means: `optim.base_lr` for `lr`, `optim.lr` and
    `learning-rate`; None for other words.

    Includes a value if it is also another tool's word, or if the word implies it:
    `model.loss=squared_error` for loss_fn=mse.
    """
    word = _plain(key)
    parts = word.split(".")
    keys = _words().keys
    right = next(
        (keys[name] for first in range(len(parts)) if (name := ".".join(parts[first:])) in keys),
        None,
    )
    if right is None:
        return None
    right_one = right_value(right, value)
    return right if right_one is None else f"{right}={right_one}"


def right_value(key: str, value: Any) -> str | None:
    """Returns the value of a key that another tool's word means: squared_error for
    model.loss=mse."""
    return _words().values.get(key, {}).get(str(value).lower())


def without_a_value(key: str, value: Any) -> str | None:
    """Returns the alternative to a value that other tools have and hvdtrain does not."""
    return _words().no_values.get(key, {}).get(str(value).lower().partition(":")[0])


def without_a_key(word: str) -> str | None:
    """Returns how to set something for which other tools have a key and hvdtrain does not."""
    return _words().no_keys.get(_plain(word).rpartition(".")[2])


def assignment_of(word: str) -> str | None:
    """Returns key=value for a value on its own: model.loss=squared_error for `mse`."""
    return next(
        (
            f"{key}={values[word.lower()]}"
            for key, values in _words().values.items()
            if word.lower() in values
        ),
        None,
    )


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
