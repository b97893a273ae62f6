"""The files of each split of a stored data set, and reads from files that must not change during a
job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.core.folder import check_regular
from hvdtrain.data.source import Split
from hvdtrain.errors import UserError

_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "test")}


@dataclass(frozen=True)
class FileOnDisk:
    """A file in the state in which the job opened it."""

    path: Path
    size: int
    mtime_ns: int

    @staticmethod
    def at(path: Path) -> FileOnDisk:
        """Returns the current state of a file. Raises UserError if it cannot be accessed, or is a
        pipe or a device."""
        try:
            status = check_regular(path)
        except OSError as error:
            raise UserError(
                f"the file cannot be read: {error.strerror or error}",
                str(path),
                "data.root=FILE or FOLDER",
            ) from None
        return FileOnDisk(path, status.st_size, status.st_mtime_ns)

    @contextlib.contextmanager
    def opened(self) -> Iterator[OpenFile]:
        """Reopens the file for each use, because a process may not be able to keep all files open;
        the page cache makes that cheap.

        Raises UserError if it has changed since at(), and if it cannot be read.
        """
        try:
            descriptor = os.open(
                self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
            try:
                status = os.fstat(descriptor)
                if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
                    raise UserError(
                        "the file has changed since the job began",
                        str(self.path),
                        "start again, once nobody writes to it",
                    )
                yield OpenFile(descriptor, self.path)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UserError(
                f"the file cannot be read: {error.strerror or error}",
                str(self.path),
                "repair it, and start again",
            ) from error


@dataclass(frozen=True)
class OpenFile:
    descriptor: int
    path: Path

    def read(self, offset: int, count: int) -> bytes:
        """Reads `count` bytes. Raises UserError if the file is too short."""
        content = os.pread(self.descriptor, count, offset)
        while len(content) < count:
            more = os.pread(self.descriptor, count - len(content), offset + len(content))
            if not more:
                raise cut_off(
                    self.path,
                    f"it ends at byte {offset + len(content)}, but an array extends to "
                    f"{offset + count}",
                )
            content += more
        return content


def cut_off(path: Path, how: str) -> UserError:
    return UserError(
        f"the file is cut off or damaged: {how}", str(path), "copy it again, or write it again"
    )


def files_of_split(
    root: Path, split: Split, suffixes: tuple[str, ...], name: str
) -> tuple[list[Path], bool]:
    """Returns the files of a split in order, and whether they contain only this split; otherwise
    they contain all samples.

    root: a file; a folder with train/*.h5 and val/*.h5 or train*.h5 and val*.h5 (or validation,
    test); or a folder of such files. A folder whose name has the suffix of a file is treated as a
    file. Raises UserError if there are no such files.
    """
    if root.name.endswith(suffixes) or root.is_file():
        return [root], False
    try:
        for word in _SPLITS[split]:
            if found := _inside(root / word, "", suffixes) or _inside(root, word, suffixes):
                return found, True
        everything = [] if _has_splits(root, suffixes) else _inside(root, "", suffixes)
    except OSError as error:
        raise UserError(
            f"the files cannot be listed: {error.strerror or error}",
            str(root),
            "data.root=FILE or FOLDER",
        ) from None
    if everything:
        return everything, False
    wanted = " or ".join(
        f"{word}/*{suffixes[0]}, {word}*{suffixes[0]}" for word in _SPLITS[split][:1]
    )
    what = f"no files {wanted}" if root.is_dir() else "no such file or folder"
    raise UserError(
        what,
        str(root),
        f"data.name={name} data.root=FILE{suffixes[0]}, or a folder with train{suffixes[0]} and "
        f"val{suffixes[0]}",
    )


def _has_splits(root: Path, suffixes: tuple[str, ...]) -> bool:
    words = [word for words in _SPLITS.values() for word in words]
    return any(
        _inside(root / word, "", suffixes) or _inside(root, word, suffixes) for word in words
    )


def _inside(folder: Path, beginning: str, suffixes: tuple[str, ...]) -> list[Path]:
    if not folder.is_dir() or folder.name.endswith(suffixes):
        return []
    names = (entry.name for entry in os.scandir(folder))
    return [
        folder / name
        for name in sorted(names)
        if name.startswith(beginning) and name.endswith(suffixes) and name[0] != "."
    ]
