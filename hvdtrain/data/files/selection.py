"""The state of a file; which files of a data set data.stage copies, and how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class FileState(NamedTuple):
    """The size and times of a file, which change when it is written."""

    size: int  # bytes
    mtime_ns: int


class FileSelection(NamedTuple):
    """Some files below a root: those in `folder` whose names match `pattern`; if recursive, all
    files below `folder`."""

    folder: str
    pattern: str = "*"
    recursive: bool = False


def whole_root(name: str, source: Path) -> tuple[FileSelection, ...]:
    return (FileSelection("", recursive=True),)


class Staging(NamedTuple):
    """How the files of a data set are copied; it is STAGING in the module of the data set, in
    data/datasets/. By default all files below its root are copied, and downloaded if there are
    none."""

    has_files: bool = True
    is_read_once: bool = False  # the files are read once, at the start, and kept in memory
    is_of_user: bool = False  # the user's files, which are never downloaded
    may_be_a_file: bool = False  # data.root may be a file instead of a folder
    keeps_decoded: bool = False  # arrays and an index made from the files are staged, too
    # selects the files that a data set with this name reads below its root
    selections: Callable[[str, Path], tuple[FileSelection, ...]] = whole_root
