"""Where the samples of a WebDataset archive lie in it: a plain tar, read header by header, nothing extracted."""

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

from hvdtrain.config.yaml_reader import first_line, short
from hvdtrain.data.images.decode import MOST_BYTES
from hvdtrain.errors import UserError

_IMAGES = ("jpg", "jpeg", "png", "webp")
_MOST_CLASSES = 2**20
_MOST_HEADER_BYTES = 2**20  # of a long name or of extended fields
_MOST_LABEL_BYTES = 64
_END_BYTES = 2**16  # looked at behind the end mark: tar pads to 10 KiB, so that a joined archive begins within
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\3\4": "zip"}
_WRITE_FIX = "write it anew, with `tar --sort=name` or a WebDataset writer"


class Sample(NamedTuple):
    offset: int  # of the image's first byte in the archive
    size: int  # of the image, bytes
    label: int


class _Part(NamedTuple):
    """A member of the archive, as the format splits its name: at the first dot of its last component."""

    key: str
    suffix: str
    member: tarfile.TarInfo


def samples(path: Path) -> list[Sample]:
    """Every sample, in order: neighbours KEY.jpg (jpeg, png, webp) and KEY.cls; other members of a KEY are passed over."""
    found = []
    with _opened(path) as file:
        parts = (part for member in _members(path, file) if (part := _split(member)))
        for key, group in groupby(parts, lambda part: part.key):
            members = [part for part in group if part.suffix == "cls" or part.suffix in _IMAGES]
            if members:
                found.append(_sample(path, file, key, members))
    return found


def name_at(path: Path, offset: int) -> str:
    """The archive and its member whose content begins at `offset`: read from its headers, for a message."""
    with contextlib.suppress(UserError), _opened(path) as file:
        for member in _members(path, file):
            if member.offset_data == offset:
                return f"{path}: {short(member.name)}"
    return f"{path}: byte {offset}"


def _sample(path: Path, file: IO[bytes], key: str, parts: list[_Part]) -> Sample:
    where = f"{path}: {short(parts[0].member.name)}"
    images = [part.member for part in parts if part.suffix != "cls"]
    labels = [part.member for part in parts if part.suffix == "cls"]
    if (len(images), len(labels)) != (1, 1):
        fix = f"one image and one {short(key)}.cls, side by side: {_WRITE_FIX}"
        raise UserError(f"sample {short(key)} has {len(images)} images and {len(labels)} labels", where, fix)
    image, label = images[0], labels[0]
    for member in (image, label):
        if not member.isreg() or member.issparse():
            raise UserError(
                "the member is no plain file, but a link, a sparse file or a device", f"{path}: {short(member.name)}", _WRITE_FIX
            )
    if not 1 <= image.size <= MOST_BYTES:
        what = f"the image is a file of {image.size} bytes, expected 1 to {MOST_BYTES}"
        raise UserError(what, f"{path}: {short(image.name)}", "mend or remove the sample")
    return Sample(image.offset_data, image.size, _label(path, file, label))


def _label(path: Path, file: IO[bytes], member: tarfile.TarInfo) -> int:
    text = os.pread(file.fileno(), min(member.size, _MOST_LABEL_BYTES), member.offset_data).strip()
    if member.size > _MOST_LABEL_BYTES or not re.fullmatch(rb"[0-9]{1,18}", text) or int(text) >= _MOST_CLASSES:
        shown = short(text.decode("ascii", "backslashreplace"), 40)
        fix = "the number of the class in decimal digits"
        raise UserError(f"the label is {shown!r}, expected 0 to {_MOST_CLASSES - 1}", f"{path}: {short(member.name)}", fix)
    return int(text)


def _split(member: tarfile.TarInfo) -> _Part | None:
    """None of a folder, of a hidden name, of one without a dot, and of the format's own __notes__."""
    folder, slash, base = member.name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    notes = re.match(r"__[^/]*__(/|$)", member.name)
    return None if member.isdir() or not stem or not dot or notes else _Part(folder + slash + stem, suffix.lower(), member)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError("the archive is not a regular file", str(path), "remove it")
        with path.open("rb") as file:
            head = file.read(6)
            for magic, kind in _PACKED.items():
                if head.startswith(magic):
                    raise UserError(
                        f"the archive is compressed ({kind})", str(path), "decompress it: images are read by their position in it"
                    )
            file.seek(0)
            yield file
    except OSError as error:
        raise UserError(f"the archive cannot be read: {error}", str(path), "mend or remove it") from error


def _members(path: Path, file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """All of them, in order, each whole inside the file; of a damaged archive a UserError."""
    size, last = os.fstat(file.fileno()).st_size, -1
    try:
        with tarfile.open(fileobj=cast("Any", _Headers(file)), mode="r:") as tar:
            while (member := tar.next()) is not None:
                if member.size < 0 or member.offset <= last:
                    raise _damaged(path, f"{short(member.name)} has an impossible size, {member.size}")
                if member.isreg() and not member.issparse() and member.offset_data + member.size > size:
                    raise _damaged(path, f"{short(member.name)} ends at byte {member.offset_data + member.size}, the file at {size}")
                last = member.offset
                tar.members.clear()  # type: ignore[attr-defined]  # else it remembers all
                yield member
            end = tar.offset
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # tarfile raises TarError, ValueError, OverflowError, RecursionError and more of hostile headers
        raise _damaged(path, f"{type(error).__name__}: {first_line(error)}") from error
    _check_end(path, file, end)


def _check_end(path: Path, file: IO[bytes], end: int) -> None:
    """tarfile takes a damaged header, and the end of the file, for the end of the archive."""
    file.seek(end)
    rest = file.read(_END_BYTES)
    if len(rest) < tarfile.BLOCKSIZE:
        raise _damaged(path, f"the file ends at byte {end} without the mark that ends an archive")
    if any(rest):
        kind = (
            "a damaged header" if any(rest[: tarfile.BLOCKSIZE]) else "another archive behind the end of this one, which would not be read,"
        )
        raise _damaged(path, f"{kind} at byte {end}")


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"the archive is damaged or cut off: {what}", str(path), "copy it again, or " + _WRITE_FIX)


class _Headers:
    """What tarfile reads of the file: no header may ask for endless memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._read(size)
