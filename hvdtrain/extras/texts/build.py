"""Builds every data set of texts: its files, the targets of its records, and the reader of their
tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hvdtrain.data.option_error import OptionError, expanded
from hvdtrain.data.source import Source, Split
from hvdtrain.errors import UserError, first_line
from hvdtrain.extras.split_files.files import files_of_split
from hvdtrain.extras.texts.document_reader import document_reader
from hvdtrain.extras.texts.documents import Documents, paths_of
from hvdtrain.extras.texts.lines import Lines, LinesOfFile
from hvdtrain.extras.texts.options import TextOptions
from hvdtrain.extras.texts.record import Label, checked_label, label_of, record_of
from hvdtrain.extras.texts.targets import TargetReader, Targets, kind_of_cells

Open = Callable[[Path], LinesOfFile]
_AT_A_TIME = 4096  # lines


def build_texts(
    name: str,
    root: Path | None,
    split: Split,
    suffixes: tuple[str, ...],
    open_file: Open,
    options: TextOptions,
    *,
    cells: bool = False,
) -> Source:
    """Returns the documents of a split, which are read lazily.

    open_file: returns the lines of a path
    cells: targets are texts, which are numbers if all of the files and of the training set are

    Raises UserError without a root, without a validation set, and for wrong targets.
    """
    if root is None:
        fix = (
            f"data.root=FILE{suffixes[0]}, or a folder with train{suffixes[0]} and val{suffixes[0]}"
        )
        raise OptionError(f"data.name={name} needs data.root", "root", fix)
    folder = expanded(root, "root")
    paths, is_split = files_of_split(folder, split, suffixes, name)
    if split == "val" and not is_split:
        what = f"{folder.name} contains all documents, without a validation set"
        fix = f"data.val_share=0.1; or a folder with train{suffixes[0]} and val{suffixes[0]}"
        raise OptionError(what, "root", fix)
    notes: list[str] = []
    reader = document_reader(options, notes)
    lines = Lines(tuple(map(open_file, paths)))
    where = paths_of(paths)
    if not len(lines):
        raise UserError("there are no records", where, "one JSON object or row for each document")
    targets = None
    if options.target is not None:
        target = options.target
        names = None
        sets = [lines]
        if split == "val":
            training = files_of_split(folder, "train", suffixes, name)[0]
            sets.append(Lines(tuple(map(open_file, training))))
        texts = (str(label) for one in sets for label, _ in _labels(one, target))
        kind = kind_of_cells(texts) if cells else None
        if split == "val":
            names = _targets(sets[1], target, kind, None).class_names
        targets = _targets(lines, target, kind, names)
    return Documents(lines, reader, targets, where, tuple(notes))


def _targets(
    lines: Lines,
    target: str,
    kind: Callable[[str], Label] | None,
    class_names: Sequence[str] | None,
) -> Targets:
    """Returns the targets of all lines. Every rank reads them all. kind: converts cells."""
    found = TargetReader(target)
    for label, where in _labels(lines, target):
        value = label if kind is None else checked_label(kind(str(label)), target, where)
        found.add(value, where)
    return found.targets(class_names, paths_of(lines.paths))


def _labels(lines: Lines, target: str) -> Iterator[tuple[Label, str]]:
    """Yields the target of each line as it is written, and where."""
    for start in range(0, len(lines), _AT_A_TIME):
        numbers = range(start, min(start + _AT_A_TIME, len(lines)))
        for number, line in zip(numbers, lines.read(np.array(numbers)), strict=True):
            where = lines.where(number)
            yield label_of(record_of(line, where), target, where), where


def lines_of_rows(
    path: Path, rows: Iterable[tuple[int, Mapping[str, object]]], word: str = ""
) -> LinesOfFile:
    """Returns rows of a table, each with its number, as JSON lines in memory."""
    content = bytearray()
    ends = []
    numbers = []
    for number, row in rows:
        try:
            text = json.dumps(row, ensure_ascii=False)
        except TypeError as error:  # a date, or bytes
            raise UserError(
                f"the row has a cell that is neither text nor a number: {first_line(error)}",
                f"{path}, {word or 'line'} {number}",
                "another column, or write it as text",
            ) from None
        content += text.encode("utf-8", "surrogatepass")
        ends.append(len(content))
        numbers.append(number)
    edges = np.array([0, *ends], np.int64)
    return LinesOfFile(
        path, bytes(content), edges[:-1], edges[1:], np.array(numbers, np.int64), word
    )
