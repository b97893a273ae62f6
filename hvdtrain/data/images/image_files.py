"""Image files of a folder, by their paths in it."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.data.images.decode import read_file


@dataclass(frozen=True)
class ImageFiles:
    """EncodedImages in one folder."""

    where: str
    paths: list[str]  # relative to `where`; a Path would take four times the memory

    def __len__(self) -> int:
        return len(self.paths)

    def content(self, index: int) -> bytes:
        return read_file(self.name(index))

    def name(self, index: int) -> str:
        return f"{self.where}/{self.paths[index]}"
