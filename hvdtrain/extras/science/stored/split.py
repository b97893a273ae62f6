"""Splits samples into training and validation by the values of a column."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvdtrain.data.array_files import name_and_words
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import Split
from hvdtrain.errors import UserError
from hvdtrain.extras.science.stored.dates import dates_of
from hvdtrain.extras.science.stored.options import Wanted
from hvdtrain.extras.science.stored.selection import select
from hvdtrain.extras.science.stored.source import FileSamples
from hvdtrain.extras.science.stored.stored_array import (
    StoredFile,
)

_TRUTH = {"true": True, "false": False}
_VALIDATE = ("val", "valid", "validation")
_TRAIN = ("train", "training")
_DATE = r"\d{4,}(?:-\d\d(?:-\d\d(?:T\d\d(?::\d\d(?::\d\d)?)?)?)?)?"  # or its beginning
_TO = "/"  # between the ends of a range of dates, which may have colons


class SplitColumn(NamedTuple):
    """The values of data.split_by for all samples, (n,)."""

    values: np.ndarray
    are_dates: bool  # texts of a time coordinate


def split_values(
    files: list[StoredFile], paths: list[Path], parts: tuple[FileSamples, ...], text: str
) -> SplitColumn:
    """Returns the values of data.split_by. Raises UserError if the files do not match."""
    found = [_split_values_of(*one, text) for one in zip(files, paths, parts, strict=True)]
    kinds = {(one.values.dtype.kind == "U", one.are_dates) for one in found}
    if len(kinds) > 1:
        raise UserError(
            f"data.split_by={text} has texts in some files and numbers in others",
            str(paths[0].parent),
            "one kind in all files",
        )
    values = np.concatenate([one.values for one in found])
    are_truth = values.dtype.kind == "U" and np.isin(np.char.lower(values), list(_TRUTH)).all()
    return SplitColumn(np.char.lower(values) == "true" if are_truth else values, found[0].are_dates)


def _split_values_of(file: StoredFile, path: Path, part: FileSamples, text: str) -> SplitColumn:
    """Returns the values for the samples of a file; of a time coordinate its dates. Raises
    UserError if their numbers differ, or if a value is missing."""
    name, words = name_and_words(text)
    values = file.values(name)
    if values.ndim != 1:
        raise UserError(
            f"{name} is of shape {values.shape}, expected one value for each sample",
            str(path),
            "another array as data.split_by",
        )
    selection = select(words, values.shape, text, str(path))
    column = values[selection.first :: selection.step][: selection.samples]
    if len(column) != part.samples:
        fields = ", ".join(one.text for arrays in part.arrays.values() for one in arrays)
        what = (
            f"data.split_by={text} has {len(column):,} values, but the file has {part.samples:,} "
            f"samples ({fields})"
        )
        raise UserError(
            what,
            str(path),
            "one value for each sample; an array may be cut as in data.fields: 'year[:-1]'",
        )
    if column.dtype.kind == "f" and (absent := int(np.isnan(column).sum())):
        raise UserError(
            f"data.split_by={text} lacks {absent:,} values",
            str(path),
            "fill them, or remove these samples",
        )
    grid = file.grid(name)
    dates = None if grid is None else dates_of(column, grid.attributes)
    return SplitColumn(column if dates is None else dates, dates is not None)


def in_neither(column: SplitColumn, split: Split, key: str) -> Iterator[str]:
    """Returns a note if samples belong to neither the training nor the validation set."""
    values = column.values
    if split != "train" or values.dtype.kind != "U":
        return
    others = values[~np.isin(np.char.lower(values), (*_TRAIN, *_VALIDATE))]
    if len(others):
        yield (
            f"{len(others):,} samples are in neither set: {key} has "
            f"{', '.join(np.unique(others)[:8].tolist())} for them"
        )


def _is_range(value: bool | int | str, known: np.ndarray) -> bool:
    """Whether it is FIRST:LAST, FIRST: or :LAST, and not one of the values, or in their form, such
    as 12:30 among times of a day."""
    if not isinstance(value, str) or value.count(":") != 1 or known.dtype.kind == "b":
        return False
    return known.dtype.kind != "U" or _form(value) not in set(map(_form, known.tolist()))


def _form(text: str) -> str:
    return re.sub(r"\d", "0", text)


def _as_range(date: bool | int | str) -> str:
    """Returns FIRST:LAST for a date, such as 2003-06, or a range of dates. Raises OptionError for
    anything else."""
    text = str(date).replace(" ", "T")
    if re.fullmatch(_DATE, text):
        return f"{text}{_TO}{text}"
    match = re.fullmatch(f"({_DATE})?:({_DATE})?", text)
    if match is None or not any(match.groups()):
        what = f"data.split_val has {date}, but data.split_by is a time coordinate"
        fix = "dates and ranges of dates, as in 2003, 2003-06 or 2003-06-30:2005"
        raise OptionError(what, "split_val", fix)
    return _TO.join(part or "" for part in match.groups())


def _ends(value: bool | int | str) -> tuple[str, str]:
    first, _, last = str(value).partition(_TO if _TO in str(value) else ":")
    return first.strip(), last.strip()


def _inside(value: bool | int | str, values: np.ndarray) -> np.ndarray:
    """Returns which values are in a range, with both ends, bool (n,). Texts, such as dates, are
    compared by the letters that an end has: 2003:2004-06 ends on 30 June.

    Raises OptionError for an end that is not a number, for a column of numbers.
    """
    first, last = _ends(value)
    if values.dtype.kind == "U":
        return ((values >= first) | (not first)) & (
            (values.astype(f"U{max(1, len(last))}") <= last) | (not last)
        )
    try:
        low = float(first or "-inf")
        high = float(last or "inf")
    except ValueError:
        raise OptionError(
            f"data.split_val has {value}, but the column has numbers",
            "split_val",
            "as in 2003:2005",
        ) from None
    return (values >= low) & (values <= high)


def _validates(
    column: SplitColumn, wanted: Wanted, listed: Sequence[bool | int | str]
) -> np.ndarray:
    """Returns which samples have a value of data.split_val, bool (n,). Raises OptionError for one
    that no sample has."""
    values = column.values
    known = np.unique(values)
    chosen_values = [
        _TRUTH.get(str(value).lower(), value) if known.dtype.kind == "b" else value
        for value in listed
    ]
    of_range = np.zeros(len(values), bool)
    ranges = [value for value in chosen_values if column.are_dates or _is_range(value, known)]
    for value in ranges:
        inside = _inside(_as_range(value) if column.are_dates else value, values)
        if not inside.any():
            what = f"no sample is in {value}: {wanted.split_by} is {known[0]} to {known[-1]}"
            raise OptionError(what, "split_val", "FIRST:LAST, with values of that column")
        of_range |= inside
    chosen_values = [value for value in chosen_values if value not in ranges]
    absent = [value for value in chosen_values if value not in known.tolist()]
    if absent:
        what = (
            f"no sample has {', '.join(map(str, absent))}: {wanted.split_by} has the values "
            f"{', '.join(map(str, known[:12].tolist()))}"
        )
        raise OptionError(what, "split_val", "values of that column")
    chosen = np.array(chosen_values, values.dtype) if values.dtype.kind in "iufb" else chosen_values
    return np.asarray(of_range | np.isin(values, chosen))


def samples_of_split(
    column: SplitColumn, paths: list[Path], wanted: Wanted, split: Split
) -> np.ndarray:
    """Returns the samples of a split, int64 (n,), by the values of a column. Raises UserError if
    there are none."""
    values = column.values
    if wanted.split_val is not None:
        chosen = np.flatnonzero(_validates(column, wanted, wanted.split_val) == (split == "val"))
    elif column.are_dates:
        what = f"{wanted.split_by} has dates: which of them mark validation samples?"
        fix = f'data.split_val=["{np.unique(values)[-1][:4]}"]'
        raise OptionError(what, "split_by", fix)
    elif values.dtype.kind == "U":
        chosen = np.flatnonzero(
            np.isin(np.char.lower(values), _TRAIN if split == "train" else _VALIDATE)
        )
    else:
        is_truth = values.dtype.kind == "b"
        raise OptionError(
            f"{wanted.split_by} has {'true and false' if is_truth else 'numbers'}: which of them "
            "mark validation samples?",
            "split_by",
            f"data.split_val=[{'true' if is_truth else 4}]",
        )
    if not len(chosen):
        shown = ", ".join(map(str, np.unique(values)[:12].tolist()))
        what = f"no sample belongs to {split}: {wanted.split_by} has the values {shown}"
        raise UserError(
            what,
            str(paths[0]),
            "data.split_val=[VALUE, ...], the values of validation samples; or the words train "
            "and val",
        )
    return chosen.astype(np.int64, copy=False)
