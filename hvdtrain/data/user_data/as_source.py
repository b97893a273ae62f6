"""Converts user data to a Source, without importing a library. Values are checked when they are
read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard, cast

import numpy as np

from hvdtrain.core.extras import streams
from hvdtrain.data.declared import CheckedSource
from hvdtrain.data.field import TARGETS, Padding, check_numbers
from hvdtrain.data.input_encoding import EncodedData
from hvdtrain.data.source import LabelledImages, NamedArrays, Source
from hvdtrain.data.user_data.arrays import (
    columns_of_frame,
    columns_of_hugging_face,
    flat_fields,
    from_arrays,
    is_array,
    is_read_by_row,
    read_safetensors,
)
from hvdtrain.data.user_data.dataset import from_dataset
from hvdtrain.data.user_data.sequences import from_ragged, is_ragged
from hvdtrain.data.user_data.user_source import MEMBERS, user_source
from hvdtrain.errors import UserError

_NO_PADDING: Mapping[str, Padding] = MappingProxyType({})
_GIVE = (
    'give a dict of arrays, one row for each sample: {"x": x, "y": y}; a pair of them; a list of '
    "a pair (x, y) for each sample; "
    "the path of a .safetensors file; a pandas DataFrame; a Hugging Face Dataset; a torch "
    "Dataset, or a tuple of it and its collate "
    "function, or its DataLoader; or a source (docs/tasks.md)"
)
_INDEX = (
    "a Dataset with __len__ and __getitem__, an index of where each sample is; or "
    "data.name=webdataset, which makes one of tar files"
)


def as_source(
    given: object,
    name: str,
    where: str,
    workers: int | None = None,
    kept: tuple[str, ...] = (),
    padding: Mapping[str, Padding] = _NO_PADDING,
    gaps: Collection[str] = (),
) -> Source:
    """Converts a dict of arrays, a .safetensors file, a table, a torch Dataset (docs/data.md) or a
    user's source to a Source.

    name: of the data, for messages: "mine:numbers, train".
    where: the key or call that passed them.
    workers: processes that read a torch Dataset; None: num_workers of its DataLoader.
    kept: names of fields, such as image and label, that are not renamed to x and y.
    padding: of variable-length fields.
    gaps: fields of arrays whose floats may be NaN.
    Raises UserError for anything else, and for invalid data.
    """
    source = (
        given.source(name, where)
        if isinstance(given, EncodedData)
        else _as_source(given, name, where, workers, kept, padding, gaps)
    )
    if not len(source):
        raise UserError(f"{name} has no samples", where, "data with one sample or more")
    columns = _columns(given)
    return (
        dataclasses.replace(source, columns=columns)
        if columns and isinstance(source, NamedArrays)
        else source
    )


def in_order_of(given: Any, columns: Sequence[str]) -> Any:
    """Returns the data with the columns of a DataFrame in this order, if it has these and a
    target."""
    if _is_a(given, "pandas", "DataFrame"):
        names = {str(name): name for name in given.columns}
        targets = [name for name in names if name in TARGETS and name not in columns]
        is_same = sorted(names) == sorted([*columns, *targets])
        return given[[names[name] for name in (*columns, *targets)]] if is_same else given
    if _is_pair(given):
        return (in_order_of(given[0], columns), given[1])
    if isinstance(given, Mapping) and "x" in given:
        return {**given, "x": in_order_of(given["x"], columns)}
    return given


def _columns(given: object) -> dict[str, tuple[str, ...]]:
    """Returns the column names of each field that a DataFrame becomes."""
    if _is_a(given, "pandas", "DataFrame"):
        names = [str(name) for name in cast("Any", given).columns]
        target = next((name for name in TARGETS if name in names), None)
        if target is None or "x" in names:  # then each column is a field with the same name
            return {}
        return {"x": tuple(name for name in names if name != target)}
    if _is_pair(given):
        given = {"x": given[0]}
    fields = given if isinstance(given, Mapping) else {}
    return {
        name: tuple(map(str, cast("Any", value).columns))
        for name, value in fields.items()
        if _is_a(value, "pandas", "DataFrame")
    }


def _as_source(
    given: object,
    name: str,
    where: str,
    workers: int | None,
    kept: tuple[str, ...],
    padding: Mapping[str, Padding],
    gaps: Collection[str],
) -> Source:
    if isinstance(given, (str, Path)):
        given = read_safetensors(Path(given).expanduser(), name, where)
    elif _is_a(given, "pandas", "DataFrame"):
        given = columns_of_frame(given, name, where)
    elif _is_a(given, "datasets", "Dataset") and not is_read_by_row(given):
        given = columns_of_hugging_face(given, name, where, padding)
    elif _is_a(given, "torch", "TensorDataset"):
        given = _tensors(cast("Any", given).tensors, name, where)
    elif _is_pair(given):
        given = {"x": given[0], "y": given[1]}
    inputs: tuple[str, ...] = ()
    if isinstance(given, Mapping):
        given, inputs = flat_fields(given, name, where)
    if isinstance(given, Mapping) and given and (padding or any(map(is_ragged, given.values()))):
        return from_ragged(given, padding, name, where, inputs)
    _refuse_lists(given, name, where)
    if isinstance(given, Mapping) and given and all(is_array(value) for value in given.values()):
        if workers:
            what = (
                f"data.workers={workers} starts processes that read a torch Dataset, but {name} "
                "contains arrays, which need none"
            )
            raise UserError(what, where, "leave data.workers out")
        return from_arrays(given, name, where, inputs, gaps)
    if all(hasattr(given, member) for member in MEMBERS):
        source = user_source(given)
        _refuse_padding(source, padding, name, where)
        return _checked(source, name)
    dataset, collate, loader = parts_of(given)
    if type(dataset).__name__ == "DatasetDict":
        raise UserError(
            f"{name} contains all splits: {', '.join(cast('Any', dataset))}",
            where,
            "give one split of it",
        )
    _refuse_iterable(dataset, name, where)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or isinstance(
        dataset, (Mapping, np.ndarray)
    ):
        raise UserError(f"{name} is {_described(given)}", where, _GIVE)
    return from_dataset(dataset, collate, loader, name, where, workers, kept, padding)


def _refuse_padding(source: Source, padding: Mapping[str, Padding], name: str, where: str) -> None:
    """Raises UserError if a user's source does not pad a field itself."""
    for name_of_field in padding:
        if name_of_field not in source.fields or source.fields[name_of_field].padding is None:
            what = (
                f"data.pad or data.pack has {name_of_field}, but all samples of {name} have the "
                "same length"
            )
            raise UserError(
                what, where, "leave it out; or a torch Dataset, or a dict with a list of arrays"
            )


def _checked(source: Source, name: str) -> Source:
    """Returns a source that checks samples when it reads them; labels of images are all checked
    here."""
    if isinstance(source, LabelledImages):
        check_numbers("y", source.labels(), source.fields["y"], name)
        return source
    return source if isinstance(source, NamedArrays) else CheckedSource(source, name)


def _is_pair(given: object) -> TypeGuard[Sequence[Any]]:
    """Whether the value is a pair (x, y) of all samples: two arrays, or a dict of arrays and an
    array."""
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not is_array(given[1]):
        return False
    return is_array(given[0]) or (isinstance(given, tuple) and isinstance(given[0], Mapping))


def parts_of(given: object) -> tuple[object, Any, Any]:
    """Returns the Dataset, its collate function and its DataLoader, if given."""
    if isinstance(given, tuple) and len(given) == 2 and (given[1] is None or callable(given[1])):
        return given[0], given[1], None
    if _is_a(given, "torch", "DataLoader"):
        return cast("Any", given).dataset, cast("Any", given).collate_fn, given
    return given, None, None


def comes_in_order(dataset: object) -> bool:
    """Whether data only give their next sample."""
    return (
        _is_a(dataset, "torch", "IterableDataset")
        or _is_a(dataset, "datasets", "IterableDataset")
        or _only_iterates(dataset)
    )


def _refuse_iterable(dataset: object, name: str, where: str) -> None:
    if comes_in_order(dataset):
        what = (
            f"{name} is a {type(dataset).__name__}, whose samples come in an order of its own: no "
            "rank can take its exact share"
        )
        fix = (
            _INDEX
            if _is_a(dataset, "torch", "Dataset") or _is_a(dataset, "datasets", "IterableDataset")
            else f"list() of it; or {_INDEX}"
        )
        fix = "; or ".join(filter(None, (fix, streams())))
        raise UserError(f"{what}, so no job could resume", where, fix)


def _only_iterates(dataset: object) -> bool:
    """Whether a Dataset yields samples only in order, or has no length."""
    gives_samples = hasattr(dataset, "__iter__") or _is_a(dataset, "torch", "Dataset")
    return gives_samples and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


def _tensors(tensors: Any, name: str, where: str) -> dict[str, Any]:
    if len(tensors) > 2:
        raise UserError(
            f"{name} is a TensorDataset of {len(tensors)} tensors without names",
            where,
            'give a dict: {"x": ..., "y": ...}',
        )
    return dict(zip(("x", "y"), tensors, strict=False))


def _refuse_lists(given: object, name: str, where: str) -> None:
    """Raises UserError for lists instead of arrays, and for x without a name."""
    if isinstance(given, Mapping):
        wrong = next(
            (field for field, value in given.items() if isinstance(value, (list, tuple, range))),
            None,
        )
        if wrong is not None:
            raise UserError(
                f"{wrong} of {name} is a {type(given[wrong]).__name__}",
                where,
                f"an array: np.array({wrong}), or a tensor",
            )
    if (
        isinstance(given, (tuple, list))
        and len(given) == 2
        and all(_is_column(value) for value in given)
    ):
        what = (
            f"{name} is a pair of "
            f"{' and '.join(f'a {type(value).__name__} of {len(value)}' for value in given)}"
        )
        raise UserError(
            what, where, "arrays: (np.array(x), np.array(y)); or one list of pairs: list(zip(x, y))"
        )


def _is_column(value: object) -> bool:
    """Whether the value is a list or an array of more than two elements, such as x or y of all
    samples."""
    return (isinstance(value, list) and len(value) > 2) or (
        is_array(value) and cast("Any", value).ndim > 0
    )


def _described(given: object) -> str:
    """Describes an unsupported value, and what the user may have meant."""
    if isinstance(given, Mapping):
        kinds = ", ".join(f"{field}: {type(value).__name__}" for field, value in given.items())
        return f"a dict of other things than arrays ({kinds})" if given else "a dict without fields"
    if is_array(given):
        return f"one array {cast('Any', given).shape} without a name"
    if isinstance(given, type) or callable(given):
        return f"a {type(given).__name__}, not what it gives: call it"
    missing = [member for member in MEMBERS if not hasattr(given, member)]
    name = type(given).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return (
        f"{article} "
        f"{name}{'' if len(missing) >= len(MEMBERS) - 1 else ' without ' + ', '.join(missing)}"
    )


def _is_a(given: object, package: str, class_name: str) -> bool:
    """Whether the value is an instance of a package's class or of a subclass."""
    return any(
        base.__name__ == class_name and base.__module__.partition(".")[0] == package
        for base in type(given).__mro__
    )
