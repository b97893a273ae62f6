"""What every data set of stored arrays is made by: its files opened, its fields found and compared,
its split by a column."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.config.read import expand
from hvdtrain.data.field import Field
from hvdtrain.data.own.arrays import TARGETS, has_channels_first
from hvdtrain.data.own.as_source import CheckedSource
from hvdtrain.data.source import Source, Split
from hvdtrain.data.stored.cache import BlockCache
from hvdtrain.data.stored.files import FileOnDisk, files_of_split
from hvdtrain.data.stored.images import images_of
from hvdtrain.data.stored.selection import name_and_words, select
from hvdtrain.data.stored.source import Part, Selected, StoredSamples, StoredSource
from hvdtrain.data.stored.stored_array import (
    MOST_ROWS,
    Labels,
    PlainRows,
    StoredFile,
    as_yaml,
    check_shape,
    is_missing,
    whole,
)
from hvdtrain.data.subset import subset
from hvdtrain.errors import UserError, short

Open = Callable[[Path], StoredFile]
_FIELDS = "data.fields={x: NAME, y: NAME}"
_NUMBER = re.compile(
    r"[-+]?([0-9]{1,3}([.,][0-9]{3})+|[0-9]+|(?=[.,][0-9]))([.,][0-9]*)?(e[-+]?[0-9]+)?",
    re.IGNORECASE,
)
_MOST_NAMES = 2**16
_TRUTH = {"true": True, "false": False}
_VALIDATE = ("val", "valid", "validation")
_TRAIN = ("train", "training")


@dataclass(frozen=True)
class Wanted:
    """The options that all these data sets have."""

    fields: Mapping[str, str | list[str]] | None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    split_by: str | None = None
    split_val: Sequence[bool | int | str] | None = None
    cache_mb: int = 256


def build_stored(
    name: str,
    root: Path | None,
    split: Split,
    suffixes: tuple[str, ...],
    open_file: Open,
    wanted: Wanted,
) -> Source:
    """The samples of a split, read lazily. open_file: of a path, which is pickled by the arrays it
    gives.

    Raises UserError without a root, for a field that the files lack, and for files that do not fit
    each other.
    """
    if root is None:
        fix = (
            f"data.root=FILE{suffixes[0]}, or a folder with train{suffixes[0]} and val{suffixes[0]}"
        )
        raise UserError(f"data.name={name} needs data.root", "data.root", fix)
    _check(wanted)
    paths, of_split_alone = files_of_split(expand(root, "data.root"), split, suffixes, name)
    files = [open_file(path) for path in paths]
    fields = _fields(wanted, split, files[0], paths[0])
    others = (
        _training_paths(expand(root, "data.root"), suffixes, name)
        if split == "val" and of_split_alone and _texts_of(files[0], fields, may_be_names=True)
        else []
    )
    names = (
        _class_names(map(open_file, others), others, wanted)
        if others
        else _class_names(iter(files), paths, wanted)
    )
    kinds, parts = _parts(files, paths, fields, wanted, names)
    samples = _samples(
        f"{name} {paths[0]}" if len(paths) == 1 else f"{name} {paths[0].parent}",
        parts,
        kinds,
        paths,
        fields,
        wanted,
    )
    if not samples.parts:
        raise UserError(
            "the files have no samples", str(paths[0].parent), "data with one sample or more"
        )
    if (total := sum(part.samples for part in parts)) > MOST_ROWS:
        raise UserError(
            f"the files have {total:,} samples, at most {MOST_ROWS:,}",
            str(paths[0].parent),
            "data.root=FOLDER with fewer of them",
        )
    numbers = {field: texts for field, texts in fields.items() if field != "y" or not names}
    notes = [*_left_out(files[0], fields, wanted), *_notes(files, paths, numbers, wanted)]
    values = (
        _split_values(files, paths, parts, wanted.split_by) if wanted.split_by is not None else None
    )
    if values is not None and wanted.split_val is None:
        notes += _in_neither(values, split, f"data.split_by={wanted.split_by}")
    is_table = wanted.fields is None and files[0].columns(fields["x"]) is not None
    source = StoredSource(
        samples, tuple(notes), class_names=names, columns=fields if is_table else {}
    )
    checked = images_of(source) or CheckedSource(source, samples.name)
    if values is not None:
        return subset(checked, _of_split(values, paths, wanted, split))
    if split == "val" and not of_split_alone and not _names_split(wanted):
        what = f"{paths[0].name} has all samples, and no validation set of its own"
        fix = "data.val_share=0.1; data.split_by=COLUMN; or a folder with train and val files"
        raise UserError(what, str(paths[0]), fix)
    return checked


def _notes(
    files: list[StoredFile], paths: list[Path], fields: Mapping[str, list[str]], wanted: Wanted
) -> Iterator[str]:
    """Lines for the user of each array that has one."""
    texts = dict.fromkeys(
        [text for group in fields.values() for text in group]
        + [one for one in [wanted.split_by] if one is not None]
    )
    names = dict.fromkeys(name_and_words(text)[0] for text in texts)
    for file, path in zip(files, paths, strict=True):
        yield from (f"{path}: {note}" for name in names if (note := file.note(name)))


def _left_out(file: StoredFile, fields: Mapping[str, list[str]], wanted: Wanted) -> Iterator[str]:
    """A line for the user where a table has columns that number its rows, and are not among the
    inputs."""
    names = (
        [
            name
            for name in file.names
            if name in file.coordinates and name not in (*fields["x"], wanted.split_by)
        ]
        if "x" in fields
        else []
    )
    if wanted.fields is None and names:
        yield (
            f"not in x, as they number the rows or the points of an axis, or are empty: "
            f"{', '.join(names)} "
            "(data.fields takes them)"
        )


def _check(wanted: Wanted) -> None:
    if wanted.cache_mb < 1:
        raise UserError(
            f"data.cache_mb={wanted.cache_mb} is no memory", "data.cache_mb", "megabytes, as 256"
        )
    if wanted.split_val is not None and wanted.split_by is None:
        raise UserError(
            "data.split_val are values of a column, and there is no data.split_by",
            "data.split_val",
            "data.split_by=COLUMN",
        )
    for name, dtype in (wanted.dtypes or {}).items():
        if dtype not in (
            "float16",
            "float32",
            "float64",
            "int8",
            "uint8",
            "int16",
            "uint16",
            "int32",
            "uint32",
            "int64",
            "bool",
        ):
            raise UserError(
                f"data.dtypes has {name} as {dtype!r:.40}",
                "data.dtypes",
                "float32, float64, int64, uint8, ...",
            )
        if wanted.fields is not None and name not in wanted.fields:
            raise UserError(
                f"data.dtypes names the field {name}, which data.fields lacks",
                "data.dtypes",
                f"{', '.join(wanted.fields)}",
            )


def _names_split(wanted: Wanted) -> bool:
    return any(
        "{split}" in text for texts in (wanted.fields or {}).values() for text in _listed(texts)
    )


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _fields(wanted: Wanted, split: Split, file: StoredFile, path: Path) -> dict[str, list[str]]:
    """Arrays of each field, as written: data.fields, else x and y of the file, else of a table the
    target and all other columns."""
    if wanted.fields is not None:
        for name, texts in wanted.fields.items():
            if not name.isidentifier() or not _listed(texts):
                raise UserError(
                    f"data.fields has a field named {name!r:.40}",
                    "data.fields",
                    f"names of fields are words: {_FIELDS}",
                )
        return {
            name: [text.replace("{split}", split) for text in _listed(texts)]
            for name, texts in wanted.fields.items()
        }
    names = [
        name for name in file.names if name != _split_name(wanted) and name not in file.coordinates
    ]
    known = {name.lstrip("/"): name for name in names}
    targets = [name for name in TARGETS if name in known]
    if len(targets) > 1 and not {"x", "y"} <= known.keys():
        without = [name for name in names if name.lstrip("/") not in TARGETS]
        x = f"[{', '.join(map(as_yaml, without))}]" if 0 < len(without) <= 24 else "NAME"
        choices = [f"data.fields={{x: {x}, y: {as_yaml(known[name])}}}" for name in targets]
        raise UserError(f"which of {', '.join(targets)} is y?", str(path), "; or ".join(choices))
    target = targets[0] if targets else None
    if target is None:
        _refuse_texts(file)
    if target is None or (len(names) < 2):
        raise UserError(
            f"which arrays are x and y? The file has {', '.join(names[:24]) or 'none'}",
            str(path),
            _with_capitals(names) or _FIELDS,
        )
    others = [name for name in names if name.lstrip("/") != target]
    inputs = [known["x"]] if "x" in known else others
    if len(inputs) > 1 and file.columns(inputs) is None:
        raise UserError(f"which of {', '.join(others[:24])} is x?", str(path), _FIELDS)
    return {"x": inputs, "y": [known[target]]}


def _refuse_texts(file: StoredFile) -> None:
    """Raises UserError where the file has targets that are no numbers."""
    for name in file.without_numbers:
        if name.lstrip("/") in TARGETS:
            file.array(name)


def _with_capitals(names: Sequence[str]) -> str:
    """The words for a table whose target is written in another way, as Label; else empty."""
    target = next((name for name in names if name.lower() in TARGETS), None)
    others = [name for name in names if name != target]
    x = f"[{', '.join(map(as_yaml, others))}]" if len(others) > 1 else "".join(others)
    return f"data.fields={{x: {x}, y: {target}}}" if target and 0 < len(others) <= 24 else ""


def _texts_of(
    file: StoredFile, fields: Mapping[str, list[str]], *, may_be_names: bool = False
) -> str:
    """The column y where it has names of classes, else empty. may_be_names: also where it would
    have them if the training set had some."""
    listed = fields.get("y", [])
    name, words = name_and_words(listed[0]) if len(listed) == 1 else ("", "")
    is_plain = name in file.names and not words
    edges = file.edges_of_texts(name, may_be_names=may_be_names) if is_plain else None
    return "" if edges is None else name


def _training_paths(root: Path, suffixes: tuple[str, ...], name: str) -> list[Path]:
    """The files of the training set beside those of a validation set; none where it is alone."""
    try:
        return files_of_split(root, "train", suffixes, name)[0]
    except UserError:
        return []


def _class_names(files: Iterator[StoredFile], paths: list[Path], wanted: Wanted) -> tuple[str, ...]:
    """The names in a column y of texts, sorted: the classes. Raises UserError where one is missing,
    for numbers, and for texts that are no names of classes.

    files: opened as they are taken; of a set without names only the first is.
    """
    first = next(files)
    column = _texts_of(first, _fields(wanted, "train", first, paths[0]))
    if not column:
        return ()
    found: set[str] = set()
    for file, path in zip(chain([first], files), paths, strict=True):
        names = set(map(str, np.unique(file.values(column)).tolist()))
        if missing := sorted(filter(is_missing, names)):
            raise UserError(
                f"column {column} has names of classes, and {missing[0]!r}",
                str(path),
                "a name for each sample, or remove the samples without one",
            )
        found |= names
        if len(found) > _MOST_NAMES:
            raise UserError(
                f"column {column} has {len(found):,} different texts or more: are they classes?",
                str(path),
                f"data.fields={{x: NAME, y: NAME}}, another column; at most {_MOST_NAMES:,} names",
            )
    numbers = sorted(filter(_NUMBER.fullmatch, found))
    if numbers and len(numbers) == len(found):
        number = short(repr(numbers[0]), 40)
        raise UserError(
            f"column {column} has numbers as texts, as {number}",
            str(paths[0]),
            f"write it as numbers: {_converted(f'frame[{column!r}]', numbers)}",
        )
    if numbers:
        raise UserError(
            f"column {column} has names of classes, and the number {short(numbers[0], 40)}",
            str(paths[0]),
            "names with a letter in place of numbers, as class_7; or numbers alone",
        )
    return tuple(sorted(found))


def _converted(column: str, numbers: Sequence[str]) -> str:
    """How pandas makes numbers of a column of texts."""
    if all(re.fullmatch("[-+]?[0-9]+", number) for number in numbers):
        return f"{column}.astype('int64')"
    if any("," in number for number in numbers):
        return f"{column}.str.replace(',', '.').astype('float64') of decimal commas"
    return f"{column}.astype('float64')"


def _labels(file: StoredFile, column: str, names: Sequence[str], path: Path) -> Labels:
    """The number of the class of each sample. Raises UserError for a class that is none of the
    training set."""
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


def _split_name(wanted: Wanted) -> str | None:
    return None if wanted.split_by is None else name_and_words(wanted.split_by)[0]


def _parts(
    files: list[StoredFile],
    paths: list[Path],
    fields: dict[str, list[str]],
    wanted: Wanted,
    class_names: Sequence[str],
) -> tuple[dict[str, Field], tuple[Part, ...]]:
    """The fields, as the first file has them, and the samples of each file. class_names: of y,
    where it has texts."""
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


def _samples(
    name: str,
    parts: tuple[Part, ...],
    kinds: dict[str, Field],
    paths: list[Path],
    fields: dict[str, list[str]],
    wanted: Wanted,
) -> StoredSamples:
    key = (
        ""
        if any(path.is_dir() for path in paths)
        else f"{[_state(path) for path in paths]} {fields} {kinds}"
    )
    return StoredSamples(
        kinds,
        tuple(part for part in parts if part.samples),
        name,
        BlockCache(wanted.cache_mb * 10**6),
        key,
    )


def _state(path: Path) -> tuple[str, int, int]:
    file = FileOnDisk.of(path)
    return str(path.resolve()), file.size, file.mtime_ns


def _selected(
    file: StoredFile,
    path: Path,
    texts: list[str],
    keys: Iterator[int],
    class_names: Sequence[str],
) -> Iterator[Selected]:
    """Each array of a field with what is selected of it; columns that a table reads together are
    one array."""
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
        array = _labels(file, name, class_names, path) if class_names else file.array(name)
        if not array.shape:
            raise UserError(
                f"{name} is a single number, not one row for each sample", str(path), _FIELDS
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
    """Type and shape of a field, of its arrays in the first file."""
    asked = (wanted.dtypes or {}).get(name)
    dtype = (
        np.dtype(asked) if asked else whole(np.result_type(*(one.array.dtype for one in arrays)))
    )
    return Field(str(dtype), _shape(name, arrays[0], len(arrays), dtype))


def _shape(name: str, one: Selected, arrays: int, dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Shape of a sample of a field; images x are (H, W, C), also where the file has (C, H, W)."""
    shape = one.shape if arrays == 1 else (arrays, *one.shape)
    return (
        (*shape[1:], shape[0])
        if name == "x" and dtype == np.uint8 and has_channels_first(shape)
        else shape
    )


def _part(
    arrays: dict[str, list[Selected]], kinds: Mapping[str, Field], path: Path, wanted: Wanted
) -> Part:
    """One file's samples. Raises UserError where its arrays do not fit each other, or the first
    file's."""
    lengths = {one.text: one.selection.samples for group in arrays.values() for one in group}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{text} {length}" for text, length in lengths.items())
        raise UserError(
            f"the arrays do not have the same samples: {shown}",
            str(path),
            "one row of each array for each sample",
        )
    found = {}
    for name, group in arrays.items():
        kind = kinds[name]
        for one in group:
            shape = _shape(name, one, len(group), np.dtype(kind.dtype))
            if shape != kind.shape or (
                whole(np.result_type(*(each.array.dtype for each in group))) != kind.dtype
                and name not in wanted.dtypes
            ):
                what = (
                    f"{name} is {whole(one.array.dtype)} {shape}, and {kind.dtype} {kind.shape} "
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
        found[name] = tuple(
            Selected(one.array, one.selection, np.dtype(kind.dtype), one.key, one.text, one.where)
            for one in group
        )
    return Part(next(iter(lengths.values())), found)


def _check_block(one: Selected, path: Path, wanted: Wanted) -> None:
    """Raises UserError where one block would take more memory than all blocks may."""
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


def _split_values(
    files: list[StoredFile], paths: list[Path], parts: tuple[Part, ...], text: str
) -> np.ndarray:
    """The values of data.split_by (n,) for all samples."""
    found = [_split_values_of(*one, text) for one in zip(files, paths, parts, strict=True)]
    kinds = {values.dtype.kind == "U" for values in found}
    if len(kinds) > 1:
        raise UserError(
            f"data.split_by={text} has texts in some files and numbers in others",
            str(paths[0].parent),
            "one kind in all files",
        )
    values = np.concatenate(found)
    are_truth = values.dtype.kind == "U" and np.isin(np.char.lower(values), list(_TRUTH)).all()
    return np.char.lower(values) == "true" if are_truth else values


def _split_values_of(file: StoredFile, path: Path, part: Part, text: str) -> np.ndarray:
    """The values for the samples of a file. Raises UserError where it has another number of them,
    or one is missing."""
    name, words = name_and_words(text)
    values = file.values(name)
    if values.ndim != 1:
        raise UserError(
            f"{name} is of shape {values.shape}, expected one value for each sample",
            str(path),
            "another array as data.split_by",
        )
    selection = select(words, values.shape, text, str(path))
    found = values[selection.first :: selection.step][: selection.samples]
    if len(found) != part.samples:
        fields = ", ".join(one.text for arrays in part.arrays.values() for one in arrays)
        what = (
            f"data.split_by={text} has {len(found):,} values, and the file has {part.samples:,} "
            f"samples ({fields})"
        )
        raise UserError(
            what,
            str(path),
            "one value for each sample; an array may be cut as in data.fields: 'year[:-1]'",
        )
    if found.dtype.kind == "f" and (absent := int(np.isnan(found).sum())):
        raise UserError(
            f"data.split_by={text} lacks {absent:,} values",
            str(path),
            "fill them, or remove these samples",
        )
    return found


def _in_neither(values: np.ndarray, split: Split, key: str) -> Iterator[str]:
    """A line for the user where samples are neither of the training nor of the validation set."""
    if split != "train" or values.dtype.kind != "U":
        return
    others = values[~np.isin(np.char.lower(values), (*_TRAIN, *_VALIDATE))]
    if len(others):
        yield (
            f"{len(others):,} samples are in neither set: {key} has "
            f"{', '.join(np.unique(others)[:8].tolist())} for them"
        )


def _of_split(values: np.ndarray, paths: list[Path], wanted: Wanted, split: Split) -> np.ndarray:
    """The samples of a split, int64 (n,), by the values of a column. Raises UserError where there
    are none."""
    if wanted.split_val is not None:
        known = np.unique(values)
        chosen_values = [
            _TRUTH.get(str(value).lower(), value) if known.dtype.kind == "b" else value
            for value in wanted.split_val
        ]
        absent = [value for value in chosen_values if value not in known.tolist()]
        if absent:
            what = (
                f"no sample has {', '.join(map(str, absent))}: {wanted.split_by} has the values "
                f"{', '.join(map(str, known[:12].tolist()))}"
            )
            raise UserError(what, "data.split_val", "values of that column")
        mask = np.isin(
            values,
            np.array(chosen_values, values.dtype) if values.dtype.kind in "iufb" else chosen_values,
        )
        chosen = np.flatnonzero(mask == (split == "val"))
    elif values.dtype.kind == "U":
        chosen = np.flatnonzero(
            np.isin(np.char.lower(values), _TRAIN if split == "train" else _VALIDATE)
        )
    else:
        is_truth = values.dtype.kind == "b"
        raise UserError(
            f"{wanted.split_by} has {'true and false' if is_truth else 'numbers'}: which of them "
            "validate?",
            "data.split_by",
            f"data.split_val=[{'true' if is_truth else 4}]",
        )
    if not len(chosen):
        shown = ", ".join(map(str, np.unique(values)[:12].tolist()))
        what = f"no sample is of {split}: {wanted.split_by} has the values {shown}"
        raise UserError(
            what,
            str(paths[0]),
            "data.split_val=[VALUE, ...], those that validate; or the words train and val",
        )
    return chosen.astype(np.int64, copy=False)
