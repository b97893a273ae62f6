"""The file of numbers that `predict --data` names: a table, or arrays."""

from __future__ import annotations

import csv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.own.safetensors_file import read_safetensors
from hvdtrain.data.own.table import TARGETS
from hvdtrain.errors import UserError, first_line, short

SUFFIXES = (".csv", ".npy", ".npz", ".safetensors")


def read_data_file(path: Path) -> Any:
    """An array of a table or of a .npy file, arrays by name of the others. Nothing pickled is read. Raises UserError."""
    if path.suffix not in SUFFIXES:
        fix = f"a file that ends in {', '.join(SUFFIXES)}; or package.module:function of your own, or --images DIR"
        raise UserError(f"{short(str(path))} is no file of numbers", "--data", fix)
    if not path.is_file():
        raise UserError(f"there is no file {path}", "--data", "the path of a file, or package.module:function")
    if path.suffix == ".csv":
        return read_table(path)
    if path.suffix == ".safetensors":
        return read_safetensors(path, str(path), "--data")
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            return {name: found[name] for name in found.files} if path.suffix == ".npz" else found
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}", "--data", "a file that numpy.save or numpy.savez wrote") from None


def read_table(path: Path) -> np.ndarray:
    """(n, columns) of the numbers of a CSV file, whole where all are; its first row may name the columns, and a target is left out.

    Raises UserError for a row of another length, and for what is no number.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}", "--data", "a table of numbers, as UTF-8") from None
    if not rows:
        raise UserError(f"{path} has no rows", "--data", "a row for each sample")
    names = [] if all(map(_is_number, rows[0])) else rows.pop(0)
    columns = [column for column in range(len(names or rows[0])) if not names or names[column].strip() not in TARGETS]
    width = len(names or rows[0])
    for number, row in enumerate(rows):
        if len(row) != width:
            raise UserError(f"row {number} of {path} has {len(row)} values, the first one {width}", "--data", "as many in each row")
        wrong = next((column for column in columns if not _is_number(row[column])), None)
        if wrong is not None:
            what = (
                f"row {number}, column {short(names[wrong]) if names else wrong} of {path} is {short(repr(row[wrong]))}, expected a number"
            )
            raise UserError(what, "--data", "replace it, or leave the row or the column out")
    chosen = [[row[column].strip() for column in columns] for row in rows]
    whole = all(value.lstrip("+-").isdigit() and len(value) < 18 for row in chosen for value in row)
    return np.array(chosen, str).astype(np.int64 if whole else np.float64).reshape(len(rows), len(columns))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
