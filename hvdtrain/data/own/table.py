"""Tables of named columns as arrays: which columns are the inputs x, and which is the target y."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.errors import UserError

TARGETS = ("y", "label", "labels", "target")  # the first of them that a table has is y


def columns_of_frame(frame: Any, name: str, where: str) -> dict[str, np.ndarray]:
    """{"x": (n, columns), "y": (n,)} of a pandas DataFrame: see inputs_and_target(). Raises UserError for a column without numbers."""
    columns = {}
    for column in frame.columns:
        try:
            columns[str(column)] = _numbers(frame[column].to_numpy(), column, name, where)
        except (TypeError, ValueError):  # a missing value of pandas
            raise UserError(f"column {column!r} of {name} is {frame[column].dtype}, expected numbers", where, _CONVERT) from None
    return inputs_and_target(columns, name, where)


def columns_of_hugging_face(dataset: Any, name: str, where: str) -> dict[str, np.ndarray]:
    """Columns of a Hugging Face Dataset whose columns are numbers, or lists of equally many numbers, read whole."""
    table = dataset.with_format("arrow")[:]  # in the order of the data set, which a shuffle or a filter gave it
    columns = {}
    for column in table.column_names:
        values = table[column].combine_chunks()
        columns[column] = _numbers(_from_arrow(values, column, name, where), column, name, where)
    return inputs_and_target(columns, name, where)


def is_read_by_row(dataset: Any) -> bool:
    """Whether a Hugging Face Dataset has images to decode, or a function that makes its rows: it is then read as a torch Dataset is."""
    return dataset.format["type"] == "custom" or any(type(feature).__name__ == "Image" for feature in dataset.features.values())


def inputs_and_target(columns: Mapping[str, np.ndarray], name: str, where: str) -> dict[str, np.ndarray]:
    """A column x stays as it is; else all columns but the target, single numbers, are x in their order: float32 where all are, or float64.

    Without a target every column is a field.
    """
    target = next((column for column in TARGETS if column in columns), None)
    if target is None:
        return dict(columns)
    inputs = {column: array for column, array in columns.items() if column != target}
    if not inputs:
        raise UserError(f"{name} has the target {target} and no other column", where, "columns to predict it from")
    if "x" in inputs or len(inputs) == 1:
        return {("x" if len(inputs) == 1 else column): array for column, array in inputs.items()} | {"y": columns[target]}
    wrong = next((column for column, array in inputs.items() if array.ndim > 1), None)
    if wrong is not None:
        what = f"column {wrong!r} of {name} has lists, beside other columns of inputs ({', '.join(inputs)})"
        raise UserError(what, where, "name one column x, or give a dict of arrays")
    dtype = np.float32 if all(array.dtype == np.float32 for array in inputs.values()) else np.float64
    return {"x": np.stack(list(inputs.values()), axis=1).astype(dtype, copy=False), "y": columns[target]}


def _from_arrow(values: Any, column: str, name: str, where: str) -> np.ndarray:
    """(n, ...) of an array of numbers, or of lists of lists of them that are all as long."""
    values = getattr(values, "storage", values)  # of datasets.Array2D and the like
    if values.null_count:
        raise UserError(f"column {column!r} of {name} lacks {values.null_count} values", where, "fill them, or remove these rows")
    if not hasattr(values.type, "value_type") or not hasattr(values, "flatten"):
        found: np.ndarray = values.to_numpy(zero_copy_only=False)
        return found
    is_fixed = hasattr(values.type, "list_size")
    lengths = np.array([values.type.list_size]) if is_fixed else np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
    if len(lengths) > 1:
        what = f"column {column!r} of {name} has lists of {lengths.min()} to {lengths.max()} numbers"
        raise UserError(what, where, "pad or cut them to one length")
    inner = _from_arrow(values.flatten(), column, name, where)
    return inner.reshape(len(values), int(lengths[0]) if len(lengths) else 0, *inner.shape[1:])


def _numbers(array: np.ndarray, column: Any, name: str, where: str) -> np.ndarray:
    if array.dtype.kind not in "iufb":
        raise UserError(f"column {column!r} of {name} is {array.dtype}, expected numbers", where, _CONVERT)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.nonzero(~np.isfinite(array))[0][0])
        raise UserError(f"column {column!r} of {name} has {array[row]} in row {row}, expected a finite number", where, _FILL)
    return array


_CONVERT = "leave the column out, or make numbers of it: frame[column].astype('category').cat.codes"
_FILL = "fill it, or leave the row out"
