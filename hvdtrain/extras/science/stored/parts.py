"""The samples of each file, with checks that arrays of a file and of different files agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.array_files import name_and_words
from hvdtrain.data.field import Field
from hvdtrain.data.user_data.arrays import has_channels_first
from hvdtrain.errors import UserError
from hvdtrain.extras.science.stored.class_names import labels_of
from hvdtrain.extras.science.stored.fields import FIELDS_KEY
from hvdtrain.extras.science.stored.options import Wanted
from hvdtrain.extras.science.stored.selection import select
from hvdtrain.extras.science.stored.source import FileSamples, Selected
from hvdtrain.extras.science.stored.stored_array import (
    PlainRows,
    StoredFile,
    check_shape,
    whole,
)


def parts_of_files(
    files: list[StoredFile],
    paths: list[Path],
    fields: dict[str, list[str]],
    wanted: Wanted,
    class_names: Sequence[str],
) -> tuple[dict[str, Field], tuple[FileSamples, ...]]:
    """Returns the fields, as in the first file, and the samples of each file. class_names: of y, if
    it contains strings."""
    keys = count()
    arrays = [
        {
            field_name: list(
                _selected(file, path, texts, keys, class_names if field_name == "y" else ())
            )
            for field_name, texts in fields.items()
        }
        for file, path in zip(files, paths, strict=True)
    ]
    kinds = {field_name: _kind(field_name, arrays[0][field_name], wanted) for field_name in fields}
    if class_names:
        kinds["y"] = kinds["y"]._replace(values=len(class_names))
    return kinds, tuple(
        _part(found, kinds, path, wanted) for found, path in zip(arrays, paths, strict=True)
    )


def _selected(
    file: StoredFile,
    path: Path,
    texts: list[str],
    keys: Iterator[int],
    class_names: Sequence[str],
) -> Iterator[Selected]:
    """Yields each array of a field with its selection; columns that a table reads together are one
    array."""
    pairs = [name_and_words(text) for text in texts]
    together = (
        file.columns([name for name, _ in pairs])
        if len(pairs) > 1 and not any(words for _, words in pairs)
        else None
    )
    if together is not None:
        shown = ", ".join(texts)
        check_shape(together.shape, shown, path)
        yield Selected(
            together,
            select("", together.shape, shown, str(path)),
            together.dtype,
            next(keys),
            shown,
            str(path),
        )
        return
    for text, (name, words) in zip(texts, pairs, strict=True):
        array = labels_of(file, name, class_names, path) if class_names else file.array(name)
        if not array.shape:
            raise UserError(
                f"{name} is a single number, not one row for each sample", str(path), FIELDS_KEY
            )
        check_shape(array.shape, name, path)
        yield Selected(
            array,
            select(words, array.shape, text, str(path)),
            array.dtype,
            next(keys),
            text,
            str(path),
        )


def _kind(name: str, arrays: list[Selected], wanted: Wanted) -> Field:
    """Returns the dtype and shape of a field, from its arrays in the first file."""
    asked = (wanted.dtypes or {}).get(name)
    dtype = (
        np.dtype(asked) if asked else whole(np.result_type(*(one.array.dtype for one in arrays)))
    )
    return Field(str(dtype), _shape(name, arrays[0], len(arrays), dtype))


def _shape(name: str, one: Selected, arrays: int, dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Returns the shape of a sample of a field; images x are (H, W, C), even if the file has (C, H,
    W)."""
    shape = one.shape if arrays == 1 else (arrays, *one.shape)
    return (
        (*shape[1:], shape[0])
        if name == "x" and dtype == np.uint8 and has_channels_first(shape)
        else shape
    )


def _part(
    arrays: dict[str, list[Selected]], kinds: Mapping[str, Field], path: Path, wanted: Wanted
) -> FileSamples:
    """Returns one file's samples. Raises UserError if its arrays do not match each other or the
    first file."""
    lengths = {one.text: one.selection.samples for group in arrays.values() for one in group}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{text} {length}" for text, length in lengths.items())
        raise UserError(
            f"the arrays do not have the same samples: {shown}",
            str(path),
            "arrays with one row for each sample",
        )
    by_field = {}
    for name, group in arrays.items():
        kind = kinds[name]
        for one in group:
            shape = _shape(name, one, len(group), np.dtype(kind.dtype))
            if shape != kind.shape or (
                whole(np.result_type(*(each.array.dtype for each in group))) != kind.dtype
                and name not in wanted.dtypes
            ):
                what = (
                    f"{name} is {whole(one.array.dtype)} {shape}, but {kind.dtype} {kind.shape} "
                    "in the first array or file"
                )
                raise UserError(
                    what,
                    str(path),
                    "the same type and shape everywhere; data.dtypes={"
                    + name
                    + ": float32} converts the type",
                )
            _check_block(one, path, wanted)
        by_field[name] = tuple(
            Selected(one.array, one.selection, np.dtype(kind.dtype), one.key, one.text, one.where)
            for one in group
        )
    return FileSamples(next(iter(lengths.values())), by_field)


def _check_block(one: Selected, path: Path, wanted: Wanted) -> None:
    """Raises UserError if one block would exceed the memory limit for all blocks."""
    if isinstance(one.array, PlainRows) or len(one.array.edges) < 2:
        return
    rows = int(np.diff(one.array.edges).max())
    block_mb = (
        rows
        * int(np.prod(one.selection.box.shape, dtype=np.int64))
        * one.array.dtype.itemsize
        / 1e6
    )
    if block_mb > wanted.cache_mb:
        what = (
            f"{one.text} is stored in blocks of {rows:,} samples, {block_mb:,.0f} MB, which are "
            f"read whole; data.cache_mb={wanted.cache_mb}"
        )
        raise UserError(
            what,
            str(path),
            f"data.cache_mb={2 * int(block_mb) + 1}, or write it again in smaller blocks (chunks, "
            "row groups)",
        )
