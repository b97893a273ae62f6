"""JSON lines, read by index: from a file through the offsets of its lines, or from memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.extras.split_files.files import FileOnDisk


@dataclass(frozen=True, eq=False)
class LinesOfFile:
    """The JSON lines of one file, or the rows of a table, written as JSON lines into memory."""

    path: Path
    content: FileOnDisk | bytes
    begins: np.ndarray  # int64 (n,): bytes
    ends: np.ndarray  # int64 (n,): bytes, without the end of the line
    numbers: np.ndarray  # int64 (n,): of each line, for messages
    word: str = ""  # "row" of files without lines

    def __len__(self) -> int:
        return len(self.begins)

    def read(self, indices: np.ndarray) -> list[bytes]:
        """Raises UserError if the file cannot be read, or has changed."""
        spans = list(zip(self.begins[indices].tolist(), self.ends[indices].tolist(), strict=True))
        if isinstance(self.content, bytes):
            return [self.content[begin:end] for begin, end in spans]
        with self.content.opened() as file:
            return [file.read(begin, end - begin) for begin, end in spans]

    def where(self, index: int) -> str:
        number = self.numbers[index]
        return f"{self.path}, {self.word} {number}" if self.word else f"{self.path}:{number}"


@dataclass(frozen=True, eq=False)
class Lines:
    """The lines of several files, one after the other."""

    files: tuple[LinesOfFile, ...]

    def __len__(self) -> int:
        return sum(map(len, self.files))

    @property
    def paths(self) -> list[Path]:
        return [file.path for file in self.files]

    def read(self, indices: Sequence[int] | np.ndarray) -> list[bytes]:
        """Returns these lines, in this order. Safe to call from several threads."""
        wanted = np.asarray(indices, np.int64)
        files, places = self._places(wanted)
        found: list[bytes] = [b""] * len(wanted)
        for number in np.unique(files).tolist():
            rows = np.flatnonzero(files == number)
            for row, line in zip(rows.tolist(), self.files[number].read(places[rows]), strict=True):
                found[row] = line
        return found

    def where(self, index: int) -> str:
        """Names a line for messages: its file, and its number."""
        files, places = self._places(np.array([index]))
        return self.files[int(files[0])].where(int(places[0]))

    def _places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the file of each line, and the place of the line in it."""
        edges = np.cumsum([0, *map(len, self.files)])
        files = np.searchsorted(edges, indices, "right") - 1
        return files, indices - edges[files]
