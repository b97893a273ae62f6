"""Encoded values: packed, unsigned and missing ones, by the netCDF conventions (CF 1.11, 2.5.1 and
8.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.errors import UserError
from hvdtrain.extras.science.stored.stored_array import whole

_SCALE = ("scale_factor", "add_offset")
_MISSING = ("_FillValue", "missing_value")
_RANGE = ("valid_range", "valid_min", "valid_max")  # numbers outside of it are missing

WORDS = (*_SCALE, *_MISSING, *_RANGE, "_Unsigned")  # the attributes that are read


def is_packed(attributes: Mapping[str, Any]) -> bool:
    """Whether the values in the file are encoded."""
    return any(word in attributes for word in (*_SCALE, *_MISSING, *_RANGE)) or _is_unsigned(
        attributes
    )


def _is_unsigned(attributes: Mapping[str, Any]) -> bool:
    """Whether signed integers represent unsigned ones."""
    found = attributes.get("_Unsigned", "")
    return str(found.decode() if isinstance(found, bytes) else found).lower() == "true"


def unpacked_dtype(dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> np.dtype[Any]:
    """Returns the dtype of decoded values; scaled values are float32 for up to 16 bits, else
    float64."""
    if any(word in attributes for word in _SCALE):
        return np.dtype("float32" if dtype.itemsize <= 2 else "float64")
    return whole(_unsigned(dtype) if _is_unsigned(attributes) else dtype)


def _unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(dtype.str.replace("i", "u")) if dtype.kind == "i" else dtype


def unpacked(
    raw: np.ndarray, attributes: Mapping[str, Any], dtype: np.dtype[Any], where: str
) -> np.ndarray:
    """Returns the decoded numbers: NaN if missing, else raw * scale_factor + add_offset.

    Raises UserError if integers have missing values, which would be used as numbers in training, or
    if an attribute is not a number.
    """
    found = {}
    numbers = (*_SCALE, *_MISSING, *_RANGE)
    for word in numbers:
        if word in attributes:
            found[word] = np.ravel(np.asarray(attributes[word]))
            if found[word].dtype.kind not in "iufb" or not found[word].size:
                raise UserError(
                    f"the attribute {word} is {attributes[word]!r:.40}, not a number",
                    where,
                    "write it without this attribute",
                )
    if _is_unsigned(attributes) and raw.dtype.kind == "i":
        found = {
            word: one if word in _SCALE else _as_unsigned(one, raw.dtype)
            for word, one in found.items()
        }
        raw = raw.view(_unsigned(raw.dtype))
    values = raw.astype(dtype)
    for word, operate in zip(_SCALE, (np.multiply, np.add), strict=True):
        if word in found:
            values = operate(values, dtype.type(found[word][0]))
    absent = _absent(raw, values, found)
    if absent.any():
        if dtype.kind != "f":
            what = (
                f"{int(absent.sum()):,} numbers are missing "
                f"({', '.join(word for word in found if word not in _SCALE)})"
            )
            fix = (
                "write it as floats; or without the attribute, if task.ignore_label=N should apply"
            )
            raise UserError(f"{what}, but integers have no NaN", where, fix)
        values[absent] = np.nan
    return values


def _absent(raw: np.ndarray, values: np.ndarray, found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns which values are missing. A valid range with a dtype other than the file's refers to
    unpacked values."""
    absent = np.zeros(raw.shape, bool)
    for word in _MISSING:
        if word in found:
            absent |= np.isin(raw, _in_type(found[word], raw.dtype))
    low = found.get("valid_min", np.zeros(0))
    high = found.get("valid_max", np.zeros(0))
    if "valid_range" in found:
        low = found["valid_range"][:1]
        high = found["valid_range"][1:2]
    for bound, is_outside in ((low, np.less), (high, np.greater)):
        if bound.size:
            compared = raw if bound.dtype.kind == raw.dtype.kind else values
            absent |= is_outside(
                compared,
                bound[0].astype(compared.dtype) if compared.dtype.kind == "f" else bound[0],
            )
    return absent


def _in_type(numbers: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Converts the numbers of an attribute to the array's dtype: float32(1e20) is not the float64
    1e20.

    An attribute with fewer bits than the array also matches its shortest decimal: 0.1 and 1e20 in
    float32 match the same numbers in float64.
    """
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            exact = numbers.astype(dtype)
        return (
            np.concatenate([exact, np.array([str(number) for number in numbers], dtype)])
            if numbers.dtype.kind == "f"
            else exact
        )
    limits = np.iinfo(np.uint8 if dtype.kind == "b" else dtype)
    whole_numbers = [
        int(number) for number in numbers.tolist() if np.isfinite(number) and int(number) == number
    ]
    return np.array(
        [number for number in whole_numbers if limits.min <= number <= limits.max], dtype
    )


def _as_unsigned(numbers: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Converts the numbers of an attribute, which may be signed, to the unsigned integers that they
    represent."""
    if numbers.dtype.kind == "f":
        return np.where(numbers < 0, numbers + 2.0 ** (8 * dtype.itemsize), numbers)
    if dtype.itemsize == 8:
        return numbers.astype(np.uint64)
    signed = numbers.astype(np.int64)
    return np.where(signed < 0, signed + 2 ** (8 * dtype.itemsize), signed)
