"""Locates the samples of a WebDataset archive, a plain tar file, from its headers; nothing is
extracted."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from hvdtrain.errors import UserError, first_line, short
from hvdtrain.extras.image_files.decode import MOST_BYTES

_IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
_LABEL_SUFFIX = "cls"
_MOST_CLASSES = 2**20
_MOST_HEADER_BYTES = 2**20  # bytes of a long name or of extended fields
_MOST_LABEL_BYTES = 64
# bytes checked after the end mark: tar pads to 10 KiB, so an appended archive begins within them
_END_BYTES = 2**16
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\3\4": "zip",
}
_REWRITE_FIX = "write it again, with `tar --sort=name` or a WebDataset writer"


class SampleLocation(NamedTuple):
    """One sample of an archive."""

    offset: int  # of the image's first byte, in the archive
    size: int  # of the image, in bytes
    label: int


class _Member(NamedTuple):
    """A member of the archive, with its name split at the first dot of the last path component, as
    in WebDataset."""

    key: str
    suffix: str
    info: tarfile.TarInfo


def index_samples(path: Path) -> list[SampleLocation]:
    """Returns the samples of the archive in order: adjacent members KEY.jpg (jpeg, png, webp) and
    KEY.cls. Other members of a KEY are skipped.

    Raises UserError for an incomplete or duplicate sample, a label that is not a class, and a
    damaged or compressed archive.
    """
    locations = []
    keys: set[str] = set()
    with _opened(path) as file:
        named = (member for info in _members(path, file) if (member := _split_name(info)))
        for key, group in groupby(named, lambda member: member.key):
            members = [
                member
                for member in group
                if member.suffix == _LABEL_SUFFIX or member.suffix in _IMAGE_SUFFIXES
            ]
            if members:
                if key in keys:
                    what = (
                        f"sample {short(key)} is in the archive twice, with other members in "
                        "between"
                    )
                    raise UserError(
                        what,
                        f"{path}: {short(members[0].info.name)}",
                        f"one name for each sample, its files next to each other: {_REWRITE_FIX}",
                    )
                keys.add(key)
                locations.append(_sample(path, file, key, members))
    return locations


def name_at(path: Path, offset: int) -> str:
    """Names the archive and the member whose content begins at `offset`, for a message; reads the
    headers again."""
    with contextlib.suppress(UserError), _opened(path) as file:
        for info in _members(path, file):
            if info.offset_data == offset:
                return f"{path}: {short(info.name)}"
    return f"{path}: byte {offset}"


def _sample(path: Path, file: IO[bytes], key: str, members: list[_Member]) -> SampleLocation:
    images = [member.info for member in members if member.suffix != _LABEL_SUFFIX]
    labels = [member.info for member in members if member.suffix == _LABEL_SUFFIX]
    if (len(images), len(labels)) != (1, 1):
        what = f"sample {short(key)} has {len(images)} images and {len(labels)} labels"
        fix = f"one image and one {short(key)}.cls, next to each other: {_REWRITE_FIX}"
        raise UserError(what, f"{path}: {short(members[0].info.name)}", fix)
    image = images[0]
    label = labels[0]
    for info in (image, label):
        if not info.isreg() or info.issparse():
            what = "the member is not a regular file, but a link, a sparse file or a device"
            raise UserError(what, f"{path}: {short(info.name)}", _REWRITE_FIX)
    if not 1 <= image.size <= MOST_BYTES:
        what = f"the image is a file of {image.size} bytes, expected 1 to {MOST_BYTES}"
        raise UserError(what, f"{path}: {short(image.name)}", "repair or remove the sample")
    return SampleLocation(image.offset_data, image.size, _read_label(path, file, label))


def _read_label(path: Path, file: IO[bytes], info: tarfile.TarInfo) -> int:
    content = os.pread(file.fileno(), min(info.size, _MOST_LABEL_BYTES), info.offset_data).strip()
    if (
        info.size > _MOST_LABEL_BYTES
        or not re.fullmatch(rb"[0-9]{1,18}", content)
        or int(content) >= _MOST_CLASSES
    ):
        shown = short(content.decode("ascii", "backslashreplace"), 40)
        fix = "the number of the class in decimal digits"
        raise UserError(
            f"the label is {shown!r}, expected 0 to {_MOST_CLASSES - 1}",
            f"{path}: {short(info.name)}",
            fix,
        )
    return int(content)


def _split_name(info: tarfile.TarInfo) -> _Member | None:
    """Splits a member's name; None for a folder, a hidden name, a name without a dot, and the
    format's __notes__."""
    folder, slash, base = info.name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    is_note = re.match(r"__[^/]*__(/|$)", info.name)
    if info.isdir() or not stem or not dot or is_note:
        return None
    return _Member(folder + slash + stem, suffix.lower(), info)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens the archive for reading. Raises UserError if it is compressed, is not a regular file or
    cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError("the archive is not a regular file", str(path), "remove it")
        with path.open("rb") as file:
            head = file.read(6)
            for magic, compression in _COMPRESSED.items():
                if head.startswith(magic):
                    fix = "decompress it: images are read by their position in the archive"
                    raise UserError(f"the archive is compressed ({compression})", str(path), fix)
            file.seek(0)
            yield file
    except OSError as error:
        raise UserError(
            f"the archive cannot be read: {error}", str(path), "repair or remove it"
        ) from error


def _members(path: Path, file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Yields all members in order; each lies completely inside the file. Raises UserError for a
    damaged archive."""
    size = os.fstat(file.fileno()).st_size
    last = -1
    try:
        with tarfile.open(fileobj=cast("Any", _BoundedReader(file)), mode="r:") as tar:
            while (info := tar.next()) is not None:
                if info.size < 0 or info.offset <= last:
                    raise _damaged(path, f"{short(info.name)} has an impossible size, {info.size}")
                if info.isreg() and not info.issparse() and info.offset_data + info.size > size:
                    raise _damaged(
                        path,
                        f"{short(info.name)} ends at byte {info.offset_data + info.size}, the "
                        f"file at {size}",
                    )
                last = info.offset
                tar.members.clear()  # type: ignore[attr-defined]  # else tarfile keeps all of them
                yield info
            end = tar.offset
    except (UserError, GeneratorExit):
        raise
    except Exception as error:
        # tarfile raises TarError, ValueError, OverflowError, RecursionError and more for hostile
        # headers
        raise _damaged(path, f"{type(error).__name__}: {first_line(error)}") from error
    _check_end(path, file, end)


def _check_end(path: Path, file: IO[bytes], end: int) -> None:
    """Raises UserError if the archive does not end with an end mark, because tarfile also treats a
    damaged header as the end."""
    file.seek(end)
    rest = file.read(_END_BYTES)
    if len(rest) < tarfile.BLOCKSIZE:
        raise _damaged(path, f"the file ends at byte {end} without the mark that ends an archive")
    if any(rest[: tarfile.BLOCKSIZE]):
        raise _damaged(path, f"a damaged header at byte {end}")
    if any(rest):
        raise _damaged(
            path,
            f"another archive behind the end of this one, which would not be read, at byte {end}",
        )


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"the archive is damaged or cut off: {what}", str(path), "copy it again, or " + _REWRITE_FIX
    )


class _BoundedReader:
    """A file for tarfile that raises an error if a header requests a huge read."""

    def __init__(self, file: IO[bytes]) -> None:
        self.seek = file.seek
        self.tell = file.tell
        self._read = file.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._read(size)
