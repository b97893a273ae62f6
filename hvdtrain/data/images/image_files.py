"""The image files of a folder and of the folders in it, and what is left out: the same for training and for predict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.data.images.decode import SUFFIXES, read_file
from hvdtrain.errors import UserError, short


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


_MOST_NAMED = 3  # files that are left out


class FoundImages(NamedTuple):
    """Names relative to the folder, with /; folders that are left out end with it."""

    images: list[str]  # folder by folder in the order of their paths, in each by name: as torchvision's ImageFolder has them
    left_out: list[str]  # hidden files and folders, and files with another suffix


def find_images(folder: str) -> FoundImages:
    """All image files below a folder; links are followed. Raises UserError for a circle of links, OSError for what cannot be listed."""
    found: list[tuple[str, list[str]]] = []
    left_out: list[str] = []
    _walk(folder, "", found, left_out)
    return FoundImages([below + name for below, names in sorted(found, key=_folder) for name in names], sorted(left_out))


def left_out_note(left_out: Sequence[str], folder: str) -> tuple[str, ...]:
    """A line for the user, where something is left out."""
    if not left_out:
        return ()
    named = ", ".join(map(short, left_out[:_MOST_NAMED])) + ", ..." * (len(left_out) > _MOST_NAMED)
    what = "1 file or folder that is" if len(left_out) == 1 else f"{len(left_out):,} files and folders that are"
    return (f"{folder}: left out {what} hidden or no image ({' '.join(SUFFIXES)}): {named}",)


def is_hidden(name: str) -> bool:
    return name.startswith(".")


def _folder(found: tuple[str, list[str]]) -> str:
    """The path of the folder, without its last /: a/b comes before a/b-2, and that before a/b/c."""
    return found[0].rstrip("/")


def _walk(folder: str, below: str, found: list[tuple[str, list[str]]], left_out: list[str]) -> None:
    """Adds the images of a folder and of those in it; below: its path in the whole, "" or ending with /."""
    names, folders = [], []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            is_folder = entry.is_dir()
            if is_hidden(entry.name) or not (is_folder or entry.name.lower().endswith(SUFFIXES)):
                left_out.append(f"{below}{entry.name}{'/' * is_folder}")
            elif is_folder:
                _refuse_circle(entry, folder)
                folders.append(entry.name)
            else:
                names.append(entry.name)
    found.append((below, names))
    for name in folders:
        _walk(os.path.join(folder, name), f"{below}{name}/", found, left_out)


def _refuse_circle(entry: os.DirEntry[str], folder: str) -> None:
    if entry.is_symlink():
        target, here = os.path.realpath(entry.path), os.path.realpath(folder)
        if os.path.commonpath([target, here]) == target:
            raise UserError(f"a circle of links: it leads back to {short(target)}", entry.path, "remove the link")
