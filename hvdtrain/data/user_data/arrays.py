"""Whole arrays as a source: NumPy arrays in memory or memory-mapped, torch tensors, tables of named
columns, a .safetensors file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core.folder import check_regular
from hvdtrain.data.field import TARGETS, padded_by
from hvdtrain.data.ragged import Ragged
from hvdtrain.data.source import LARGE_BYTES, ArraySource, NamedArrays, Source
from hvdtrain.data.subset import SubsetOfImages
from hvdtrain.errors import UserError, first_line

MOST_CLASSES = 2**20  # for images with integers y: larger values are not class numbers


def is_array(value: object) -> bool:
    """Whether the value is a NumPy or torch array, a Series or a DataFrame."""
    return (
        hasattr(value, "shape")
        and (hasattr(value, "__array__") or hasattr(value, "to_numpy"))
        and not isinstance(value, np.generic)
    )


def flat_fields(
    given: Mapping[Any, Any], name: str, where: str
) -> tuple[Mapping[Any, Any], tuple[str, ...]]:
    """Flattens {"x": {"image": ..., "table": ...}, "y": ...}; returns the fields and the names
    inside x. Anything else is not changed.

    Raises UserError if two fields have one name.
    """
    inner = given.get("x")
    if not isinstance(inner, Mapping) or not inner:
        return given, ()
    others = {field: value for field, value in given.items() if field != "x"}
    both = [field for field in inner if field in others]
    if both:
        raise UserError(
            f"{name} has {both[0]} both inside x and outside it",
            where,
            "another name for one of them",
        )
    return {**inner, **others}, tuple(inner)


def from_arrays(
    given: Mapping[Any, Any],
    name: str,
    where: str,
    inputs: tuple[str, ...] = (),
    gaps: Collection[str] = (),
) -> Source:
    """Creates a source of arrays by field. Images x with labels y become a data set of images and
    classes. inputs: fields that were nested in x. gaps: fields whose floats may be NaN.

    Raises UserError if they are not numbers, or if their numbers of samples differ.
    """
    for field in given:
        if not isinstance(field, str) or not field.isidentifier():
            raise UserError(
                f"{name} has a field named {field!r}",
                where,
                "names of fields are words: x, y, tokens",
            )
    arrays = {
        field: to_numpy(value, f"field {field} of {name}", where) for field, value in given.items()
    }
    if set(arrays) == {"x", "y"}:
        images = as_images(arrays["x"])
        y = arrays["y"]
        if images is not None and _are_labels(y, len(images)):
            if y.min() < 0:  # the label of samples without a class, or wrong
                return NamedArrays({"x": images, "y": y}, where=name)
            source = ArraySource(images, y, int(y.max()) + 1, name)
            return source if images.nbytes <= LARGE_BYTES else SubsetOfImages(source, None)
    arrays = {
        field: array if field == "y" else _channels_last(array) for field, array in arrays.items()
    }
    return NamedArrays(arrays, where=name, nested_inputs=inputs, gaps=frozenset(gaps))


def _channels_last(array: np.ndarray) -> np.ndarray:
    """Converts images (n, C, H, W) to (n, H, W, C); anything else is not changed."""
    is_turned = array.dtype == np.uint8 and has_channels_first(array.shape[1:])
    return array.transpose(0, 2, 3, 1) if is_turned else array


def to_numpy(value: Any, what: str, where: str) -> np.ndarray:
    """Converts to a numpy array, without a copy if possible. Raises UserError if the value does not
    contain numbers."""
    if hasattr(value, "detach"):  # a torch tensor
        value = _of_torch(value, what, where)
    if isinstance(value, np.ma.MaskedArray):
        shown = (
            f"{what} is a masked array ({np.ma.count_masked(value):,} of {value.size:,} values "
            "are masked), and its mask would be lost"
        )
        raise UserError(
            shown, where, "leave these samples out, or replace the masked values: .filled(0)"
        )
    array = value.to_numpy() if hasattr(value, "to_numpy") else np.asanyarray(value)
    if array.dtype.kind not in "iufb" or array.dtype.itemsize > 8:
        raise UserError(
            f"{what} is {array.dtype} {array.shape}, expected numbers",
            where,
            _fix_of_numbers(array),
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _fix_of_numbers(array: np.ndarray) -> str:
    fix = "convert it to integers or floats"
    return (
        fix
        if array.dtype.kind not in "OSU"
        else f"{fix}; np.unique(y, return_inverse=True)[1] counts the classes of names from 0"
    )


def _of_torch(tensor: Any, what: str, where: str) -> np.ndarray:
    try:
        tensor = tensor.detach().cpu()
        array: np.ndarray = (
            tensor.float().numpy() if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()
        )
    except (TypeError, RuntimeError, NotImplementedError) as error:  # sparse, quantized, masked
        fix = "a dense tensor of numbers: .to_dense(), .dequantize()"
        raise UserError(
            f"{what} cannot be converted to an array: {first_line(error)}", where, fix
        ) from None
    return array


def as_images(x: np.ndarray) -> np.ndarray | None:
    """Returns uint8 (n, H, W, C) for images (n, H, W, C), (n, C, H, W) with 1 or 3 channels, or
    grey ones (n, H, W); else None."""
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or 0 in x.shape[1:]:
        return None
    if x.ndim == 3:
        return x[..., None]
    return x.transpose(0, 2, 3, 1) if has_channels_first(x.shape[1:]) else x


def has_channels_first(shape: tuple[int, ...]) -> bool:
    """Whether an image of this shape is (C, H, W), as in torch, and not (H, W, C)."""
    return len(shape) == 3 and shape[0] in (1, 3) and shape[2] not in (1, 3, 4)


def _are_labels(y: np.ndarray, samples: int) -> bool:
    return y.shape == (samples,) and samples > 0 and y.dtype.kind in "iu" and y.max() < MOST_CLASSES


_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0(\.\d+)*")


def is_index(column: str) -> bool:
    """Whether a column has the name that pandas gives to an unnamed index, in Parquet files and
    when it reads a CSV file."""
    return _INDEX.fullmatch(column) is not None


def columns_of_frame(frame: Any, name: str, where: str) -> dict[str, np.ndarray]:
    """Converts a pandas DataFrame to {"x": (n, columns), "y": (n,)}: see inputs_and_target().
    Raises UserError for a column without numbers."""
    columns = {}
    for column in frame.columns:
        try:
            columns[str(column)] = _numbers(frame[column].to_numpy(), column, name, where)
        except (TypeError, ValueError):  # a missing value in pandas
            raise UserError(
                f"column {column!r} of {name} is {frame[column].dtype}, expected numbers",
                where,
                _CONVERT,
            ) from None
    return inputs_and_target(columns, name, where)


def columns_of_hugging_face(
    dataset: Any, name: str, where: str, padding: Collection[str] = ()
) -> dict[str, Any]:
    """Reads all columns of a Hugging Face Dataset whose columns are numbers or lists of equal
    length.

    padding: columns with lists of different lengths, which become Ragged. Then other columns keep
    their names, except the target.
    """
    # in the order of the data set, after a shuffle or a filter
    table = dataset.with_format("arrow")[:]
    columns: dict[str, Any] = {}
    for column in table.column_names:
        values = table[column].combine_chunks()
        if column in padding and hasattr(values, "value_lengths"):
            columns[column] = _ragged(values, column, name, where)
        else:
            columns[column] = _numbers(from_arrow(values, column, name, where), column, name, where)
    if not padding:
        return inputs_and_target(columns, name, where)
    target = next((column for column in TARGETS if column in columns), None)
    return {"y" if column == target else column: values for column, values in columns.items()}


def _ragged(values: Any, column: str, name: str, where: str) -> Ragged:
    """Converts lists of different lengths to a Ragged."""
    if values.null_count:
        raise UserError(
            f"column {column!r} of {name} lacks {values.null_count} values",
            where,
            "fill them, or remove these rows",
        )
    lengths = values.value_lengths().to_numpy(zero_copy_only=False)
    flat = _numbers(from_arrow(values.flatten(), column, name, where), column, name, where)
    return Ragged(flat, np.cumsum([0, *lengths], dtype=np.int64))


def is_read_by_row(dataset: Any) -> bool:
    """Whether a Hugging Face Dataset has images to decode or a transform; then it is read like a
    torch Dataset."""
    return dataset.format["type"] == "custom" or any(
        type(feature).__name__ == "Image" for feature in dataset.features.values()
    )


def inputs_and_target(
    columns: Mapping[str, np.ndarray], name: str, where: str
) -> dict[str, np.ndarray]:
    """Returns fields from columns. A column x is kept; otherwise x is all columns with one number
    per sample except the target, in order: float32 if all are float32, else float64.

    Without a target, every column is a field.
    """
    target = next((column for column in TARGETS if column in columns), None)
    if target is None:
        return dict(columns)
    inputs = {column: array for column, array in columns.items() if column != target}
    if "x" not in inputs and (others := [column for column in TARGETS if column in inputs]):
        raise UserError(
            f"which of {', '.join([target, *others])} of {name} is y?",
            where,
            f"leave the others out: frame.drop(columns={others}), dataset.remove_columns({others})",
        )
    if (index := next(filter(is_index, inputs), None)) is not None and "x" not in inputs:
        fix = (
            f"leave it out: frame.drop(columns={index!r}), dataset.remove_columns({index!r}); or "
            "give it another name"
        )
        raise UserError(
            f"column {index!r} of {name} is the index of a pandas table, which only numbers its "
            "rows",
            where,
            fix,
        )
    if not inputs:
        raise UserError(
            f"{name} has the target {target} and no other column",
            where,
            "columns to predict it from",
        )
    if "x" in inputs or len(inputs) == 1:
        return {
            ("x" if len(inputs) == 1 else column): array for column, array in inputs.items()
        } | {"y": columns[target]}
    wrong = next((column for column, array in inputs.items() if array.ndim > 1), None)
    if wrong is not None:
        what = (
            f"column {wrong!r} of {name} contains lists, and there are other input columns "
            f"({', '.join(inputs)})"
        )
        raise UserError(what, where, "name one column x, or give a dict of arrays")
    dtype = (
        np.float32 if all(array.dtype == np.float32 for array in inputs.values()) else np.float64
    )
    return {
        "x": np.stack(list(inputs.values()), axis=1).astype(dtype, copy=False),
        "y": columns[target],
    }


def from_arrow(
    values: Any, column: str, name: str, where: str, fix_of_lengths: str = ""
) -> np.ndarray:
    """Converts numbers, or nested lists of equal lengths, to an array (n, ...).

    fix_of_lengths: the fix for lists of different lengths, instead of data.pad.
    """
    values = getattr(values, "storage", values)  # for datasets.Array2D and similar types
    if values.null_count:
        raise UserError(
            f"column {column!r} of {name} lacks {values.null_count} values",
            where,
            "fill them, or remove these rows",
        )
    if not hasattr(values.type, "value_type") or not hasattr(values, "flatten"):
        array: np.ndarray = values.to_numpy(zero_copy_only=False)
        return array
    is_fixed = hasattr(values.type, "list_size")
    lengths = (
        np.array([values.type.list_size])
        if is_fixed
        else np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
    )
    if len(lengths) > 1:
        what = (
            f"column {column!r} of {name} has lists of {lengths.min()} to {lengths.max()} numbers"
        )
        raise UserError(
            what,
            where,
            fix_of_lengths
            or f"{padded_by(column)}, which pads each micro-batch to its longest sample; or lists "
            "of one length",
        )
    inner = from_arrow(values.flatten(), column, name, where, fix_of_lengths)
    return inner.reshape(len(values), int(lengths[0]) if len(lengths) else 0, *inner.shape[1:])


def _numbers(array: np.ndarray, column: Any, name: str, where: str) -> np.ndarray:
    if array.dtype.kind not in "iufb":
        raise UserError(
            f"column {column!r} of {name} is {array.dtype}, expected numbers", where, _CONVERT
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.nonzero(~np.isfinite(array))[0][0])
        raise UserError(
            f"column {column!r} of {name} has {array[row]} in row {row}, expected a finite number",
            where,
            _FILL,
        )
    return array


_CONVERT = (
    "leave the column out, or convert it to numbers: frame[column].astype('category').cat.codes, "
    "over both sets"
)
_FILL = "fill it, or leave the row out"


_DTYPES = {
    **{
        "BOOL": "?",
        "U8": "u1",
        "I8": "i1",
        "U16": "<u2",
        "I16": "<i2",
        "U32": "<u4",
        "I32": "<i4",
        "U64": "<u8",
        "I64": "<i8",
    },
    **{"F16": "<f2", "F32": "<f4", "F64": "<f8"},
}


def read_safetensors(path: Path, name: str, where: str) -> dict[str, np.ndarray]:
    """Reads arrays by name. Raises UserError if the file is not a safetensors file, is damaged, or
    has a dtype that numpy does not support."""
    from safetensors import SafetensorError, safe_open

    if path.suffix != ".safetensors":
        raise UserError(
            f"{name} returned the path {path}",
            where,
            "a file NAME.safetensors (safetensors.numpy.save_file writes it), or arrays",
        )
    try:
        check_regular(path)
        with safe_open(
            path, framework="numpy"
        ):  # checks the header and that the arrays fill the file exactly
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{name} cannot be read: {first_line(error)}",
            str(path),
            "a file that safetensors.numpy.save_file wrote",
        ) from None
    arrays = {}
    for field, entry in header.items():
        if field == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise UserError(
                f"{name} has {field} as {entry['dtype']}, which numpy does not know",
                str(path),
                "save it as F32 or F16",
            )
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        start = 8 + length + entry["data_offsets"][0]
        shape = tuple(entry["shape"])
        empty = 0 in shape
        arrays[field] = (
            np.zeros(shape, dtype) if empty else np.memmap(path, dtype, "r", start, shape)
        )
    return arrays
