"""Variable-length samples of a script: a dict with a list of arrays for each field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.data.field import Padding, padded_by
from hvdtrain.data.ragged import PaddedArrays, Ragged, check_padding, ragged
from hvdtrain.data.user_data.arrays import is_array, to_numpy
from hvdtrain.errors import UserError


def is_ragged(column: Any) -> bool:
    """Whether a column is a Ragged, or a list or object array whose arrays or lists have different
    lengths."""
    if isinstance(column, Ragged):
        return True
    if (
        not _is_list(column)
        or not len(column)
        or not all(is_array(one) or isinstance(one, (list, tuple)) for one in column)
    ):
        return False
    return (
        all(np.ndim(one) > 0 if is_array(one) else True for one in column)
        and len({len(one) for one in column}) > 1
    )


def _is_list(column: Any) -> bool:
    return isinstance(column, (list, tuple)) or (
        isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1
    )


def from_ragged(
    given: Mapping[Any, Any],
    padding: Mapping[str, Padding],
    name: str,
    where: str,
    nested_inputs: tuple[str, ...] = (),
) -> PaddedArrays:
    """Creates a source of arrays by field. Fields in `padding` are variable-length, or lists of
    arrays.

    nested_inputs: the fields nested in x.

    Raises UserError if another field is variable-length, or if arrays do not contain numbers.
    """
    for field, column in given.items():
        if not isinstance(field, str) or not field.isidentifier():
            raise UserError(
                f"{name} has a field named {field!r}",
                where,
                "names of fields are words: x, y, tokens",
            )
        if field not in padding and is_ragged(column):
            lengths = (
                column.lengths
                if isinstance(column, Ragged)
                else np.array([len(one) for one in column])
            )
            what = f"samples of {field} of {name} have {lengths.min()} to {lengths.max()} rows"
            raise UserError(
                what,
                where,
                f"{padded_by(field)}, which pads each micro-batch to its longest sample; or "
                "arrays of one length",
            )
    found: dict[str, np.ndarray | Ragged] = {
        field: _rows(column, f"{field} of {name}", where)
        if field in padding
        else _whole(column, field, name, where)
        for field, column in given.items()
    }
    dtypes = {
        field: str(array.values.dtype if isinstance(array, Ragged) else array.dtype)
        for field, array in found.items()
    }
    check_padding(padding, dtypes, where)
    tokens = found.get("tokens")  # for task.name=language
    values = {"tokens": _values(tokens, padding["tokens"])} if isinstance(tokens, Ragged) else {}
    return PaddedArrays(found, padding, name, values=values, nested_inputs=nested_inputs)


def _whole(column: Any, field: str, name: str, where: str) -> np.ndarray:
    if not is_array(column):
        raise UserError(
            f"{field} of {name} is a {type(column).__name__}",
            where,
            f"an array: np.array({field}), or a tensor",
        )
    return to_numpy(column, f"field {field} of {name}", where)


def _rows(column: Any, what: str, where: str) -> Ragged:
    """Concatenates the samples of a field, given as a list of arrays or an array of samples of
    equal length."""
    if isinstance(column, Ragged):
        return column
    if not _is_list(column):
        if not is_array(column) or np.ndim(column) < 2:
            shown = (
                f"a {type(column).__name__}"
                if not is_array(column)
                else f"an array {np.shape(column)}"
            )
            raise UserError(
                f"data.pad has {what}, which is {shown}",
                where,
                "a list with an array for each sample",
            )
        whole = to_numpy(column, what, where)
        return Ragged(
            whole.reshape(-1, *whole.shape[2:]), np.arange(len(whole) + 1) * whole.shape[1]
        )
    samples = [
        to_numpy(one if is_array(one) else _array(one, what, where), what, where) for one in column
    ]
    if not samples or any(not sample.ndim for sample in samples):
        shown = "a list of single numbers" if samples else "an empty list"
        raise UserError(
            f"data.pad has {what}, which is {shown}", where, "a list with an array for each sample"
        )
    return ragged(samples, what, where)


def _array(sample: Any, what: str, where: str) -> np.ndarray:
    try:
        return (
            np.array(sample, np.int64)
            if isinstance(sample, (list, tuple)) and not len(sample)
            else np.array(sample)
        )
    except ValueError:
        raise UserError(
            f"a sample of {what} is a {type(sample).__name__} of unequal parts",
            where,
            "an array for each sample",
        ) from None


def _values(array: Ragged, padding: Padding) -> int:
    """Returns 1 + the largest value, padding included, if all are non-negative integers; else 0."""
    if array.values.dtype.kind not in "iu" or not len(array.values) or array.values.min() < 0:
        return 0
    return max(int(array.values.max()), int(padding.value)) + 1
