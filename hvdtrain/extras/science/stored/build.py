"""Builds every data set of stored arrays: opens the files, finds the fields and their samples, and
selects the samples of a split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from hvdtrain.data.array_files import name_and_words
from hvdtrain.data.declared import CheckedSource
from hvdtrain.data.field import Field
from hvdtrain.data.option_error import NoValidationSet, OptionError, expanded
from hvdtrain.data.source import Source, Split
from hvdtrain.data.subset import subset
from hvdtrain.errors import UserError, short
from hvdtrain.extras.science.columns.encoded_table import EncodedTable
from hvdtrain.extras.science.stored.cache import BlockCache
from hvdtrain.extras.science.stored.cells_of_x import rows_without_missing, table_of_x
from hvdtrain.extras.science.stored.class_names import class_names_of, column_of_texts
from hvdtrain.extras.science.stored.fields import fields_of, leaves_x_to_others, names_split
from hvdtrain.extras.science.stored.images import images_of
from hvdtrain.extras.science.stored.options import Wanted, check_options
from hvdtrain.extras.science.stored.parts import parts_of_files
from hvdtrain.extras.science.stored.source import FileSamples, StoredSamples, StoredSource
from hvdtrain.extras.science.stored.split import in_neither, samples_of_split, split_values
from hvdtrain.extras.science.stored.stored_array import (
    MOST_ROWS,
    StoredFile,
)
from hvdtrain.extras.split_files.files import FileOnDisk, files_of_split

Open = Callable[[Path], StoredFile]


def build_stored(
    name: str,
    root: Path | None,
    split: Split,
    suffixes: tuple[str, ...],
    open_file: Open,
    wanted: Wanted,
) -> Source:
    """Returns the samples of a split, which are read lazily. open_file: opens a path; it is pickled
    with the arrays that it returns.

    Raises UserError without a root, for a missing field, and for files that do not match.
    """
    if root is None:
        fix = (
            f"data.root=FILE{suffixes[0]}, or a folder with train{suffixes[0]} and val{suffixes[0]}"
        )
        raise OptionError(f"data.name={name} needs data.root", "root", fix)
    check_options(wanted)
    paths, of_split_alone = files_of_split(expanded(root, "root"), split, suffixes, name)
    files = [open_file(path) for path in paths]
    fields = fields_of(wanted, split, files[0], paths[0])
    others = (
        _training_paths(expanded(root, "root"), suffixes, name)
        if split == "val"
        and of_split_alone
        and column_of_texts(files[0], fields, may_be_names=True)
        else []
    )
    table = table_of_x(files, paths, fields, wanted)
    if table is not None and leaves_x_to_others(wanted):
        fields["x"] = list(table.columns)
    stored = {field: texts for field, texts in fields.items() if table is None or field != "x"}
    names = (
        class_names_of(map(open_file, others), others, wanted)
        if others
        else class_names_of(iter(files), paths, wanted)
    )
    kinds, parts = parts_of_files(files, paths, stored, wanted, names)
    samples = _samples(
        f"{name} {paths[0]}" if len(paths) == 1 else f"{name} {paths[0].parent}",
        parts,
        kinds,
        paths,
        stored,
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
    numbers = {field: texts for field, texts in stored.items() if field != "y" or not names}
    notes = [*_left_out(files[0], fields, wanted), *_notes(files, paths, numbers, wanted)]
    if split == "val" and of_split_alone and table is None:
        notes += _not_read(files[0], paths[0], fields, wanted)
    values = (
        split_values(files, paths, parts, wanted.split_by) if wanted.split_by is not None else None
    )
    if values is not None and wanted.split_val is None:
        notes += in_neither(values, split, f"data.split_by={wanted.split_by}")
    is_table = leaves_x_to_others(wanted) and (
        table is not None or files[0].columns(fields["x"]) is not None
    )
    source = StoredSource(
        samples,
        tuple(notes),
        class_names=names,
        columns=fields if is_table else {},
        file=files[0],
    )
    checked: Source = images_of(source) or CheckedSource(source, samples.name)
    rows = None
    if table is not None and wanted.columns is not None:
        rows = rows_without_missing(table, wanted.columns, paths[0])
        dtype = wanted.dtypes.get("x", "float64")
        encoded = EncodedTable(source, table, rows, wanted.columns, samples.name, dtype)
        checked = CheckedSource(encoded, samples.name)
    if values is not None:
        chosen = samples_of_split(values, paths, wanted, split)
        return subset(checked, chosen if rows is None else chosen[np.isin(chosen, rows)])
    if split == "val" and not of_split_alone and not names_split(wanted):
        what = f"{paths[0].name} contains all samples, without a validation set"
        fix = "data.val_share=0.1; data.split_by=COLUMN; or a folder with train and val files"
        raise NoValidationSet(what, str(paths[0]), fix)
    return checked if rows is None or len(rows) == len(source) else subset(checked, rows)


def _notes(
    files: list[StoredFile], paths: list[Path], fields: Mapping[str, list[str]], wanted: Wanted
) -> Iterator[str]:
    """Returns the notes of all arrays."""
    texts = dict.fromkeys(
        [text for group in fields.values() for text in group]
        + [one for one in [wanted.split_by] if one is not None]
    )
    names = dict.fromkeys(name_and_words(text)[0] for text in texts)
    for file, path in zip(files, paths, strict=True):
        yield from (f"{path}: {note}" for name in names if (note := file.note(name)))


def _left_out(file: StoredFile, fields: Mapping[str, list[str]], wanted: Wanted) -> Iterator[str]:
    """Returns a note if columns that only number the rows are excluded from the inputs."""
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


def _not_read(
    file: StoredFile, path: Path, fields: Mapping[str, list[str]], wanted: Wanted
) -> Iterator[str]:
    """Returns a note if a table has columns that belong to no field of the training set."""
    read = {name_and_words(text)[0] for texts in fields.values() for text in texts}
    others = [
        name
        for name in file.names
        if name not in read and name != wanted.split_by and name not in file.coordinates
    ]
    if wanted.fields is not None and others and file.columns(others) is not None:
        yield f"{path}: columns in no field of the training set: {short(', '.join(others), 200)}"


def _training_paths(root: Path, suffixes: tuple[str, ...], name: str) -> list[Path]:
    """Returns the training files that belong to a validation set; none if there is only one set."""
    try:
        return files_of_split(root, "train", suffixes, name)[0]
    except UserError:
        return []


def _samples(
    name: str,
    parts: tuple[FileSamples, ...],
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
    file = FileOnDisk.at(path)
    return str(path.resolve()), file.size, file.mtime_ns
