"""A column y of strings: the names of the classes, and the class number of each sample."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from hvdtrain.data.array_files import name_and_words
from hvdtrain.errors import UserError, short
from hvdtrain.extras.science.columns.cells import is_missing
from hvdtrain.extras.science.stored.fields import fields_of
from hvdtrain.extras.science.stored.options import Wanted
from hvdtrain.extras.science.stored.stored_array import (
    Labels,
    StoredFile,
)

_NUMBER = re.compile(
    r"[-+]?([0-9]{1,3}([.,][0-9]{3})+|[0-9]+|(?=[.,][0-9]))([.,][0-9]*)?(e[-+]?[0-9]+)?",
    re.IGNORECASE,
)
_MOST_NAMES = 2**16


def column_of_texts(
    file: StoredFile, fields: Mapping[str, list[str]], *, may_be_names: bool = False
) -> str:
    """Returns the column y if it contains class names, else an empty string. may_be_names: also if
    its values could only be class names because the training set has names."""
    listed = fields.get("y", [])
    name, words = name_and_words(listed[0]) if len(listed) == 1 else ("", "")
    is_plain = name in file.names and not words
    edges = file.edges_of_texts(name, may_be_names=may_be_names) if is_plain else None
    return "" if edges is None else name


def class_names_of(
    files: Iterator[StoredFile], paths: list[Path], wanted: Wanted
) -> tuple[str, ...]:
    """Returns the sorted class names in a column y of strings. Raises UserError for a missing name,
    for numbers, and for strings that are not class names.

    files: opened one by one; only the first one if the set has no class names.
    """
    first = next(files)
    column = column_of_texts(first, fields_of(wanted, "train", first, paths[0]))
    if not column:
        return ()
    texts: set[str] = set()
    for file, path in zip(chain([first], files), paths, strict=True):
        names = set(map(str, np.unique(file.values(column)).tolist()))
        if missing := sorted(filter(is_missing, names)):
            raise UserError(
                f"column {column} has class names, but also {missing[0]!r}",
                str(path),
                "a name for each sample, or remove the samples without one",
            )
        texts |= names
        if len(texts) > _MOST_NAMES:
            raise UserError(
                f"column {column} has at least {len(texts):,} different strings: are they classes?",
                str(path),
                f"data.fields={{x: NAME, y: NAME}}, another column; at most {_MOST_NAMES:,} names",
            )
    numbers = sorted(filter(_NUMBER.fullmatch, texts))
    if numbers and len(numbers) == len(texts):
        number = short(repr(numbers[0]), 40)
        raise UserError(
            f"column {column} contains numbers as text, such as {number}",
            str(paths[0]),
            f"write it as numbers: {_converted(f'frame[{column!r}]', numbers)}",
        )
    if numbers:
        raise UserError(
            f"column {column} mixes class names with numbers, such as {short(numbers[0], 40)}",
            str(paths[0]),
            "names with a letter instead of numbers, such as class_7; or only numbers",
        )
    return tuple(sorted(texts))


def _converted(column: str, numbers: Sequence[str]) -> str:
    """Returns pandas code that converts a column of strings to numbers."""
    if all(re.fullmatch("[-+]?[0-9]+", number) for number in numbers):
        return f"{column}.astype('int64')"
    if any("," in number for number in numbers):
        return f"{column}.str.replace(',', '.').astype('float64') of decimal commas"
    return f"{column}.astype('float64')"


def labels_of(file: StoredFile, column: str, names: Sequence[str], path: Path) -> Labels:
    """Returns the class number of each sample. Raises UserError for a class that the training set
    does not have."""
    texts, places = np.unique(file.values(column).astype(str), return_inverse=True)
    edges = file.edges_of_texts(column, may_be_names=True)
    known = {name: number for number, name in enumerate(names)}
    if edges is None or (unknown := [text for text in texts.tolist() if text not in known]):
        what = "has no names of classes" if edges is None else f"has the class {unknown[0]!r}"
        raise UserError(
            f"column {column} {what}; the training set has {', '.join(names[:8])}",
            str(path),
            "the same names in all files, and each in the training set",
        )
    numbers = np.array([known[text] for text in texts.tolist()])
    return Labels(numbers.astype(np.min_scalar_type(len(names)))[places], edges)
