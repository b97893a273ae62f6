"""Copies of archives that are named by URLs: complete files in a folder of this machine, made by
one process of it."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from hvdtrain.data.files.folders import locked
from hvdtrain.data.option_error import OptionError
from hvdtrain.errors import UserError, first_line, short

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)", re.DOTALL)  # a Path has one / of the two
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_BLOCK_BYTES = 2**20
_AT_A_TIME = 4  # downloads
_TRIES = 3
_SILENT_S = 60.0  # of a connection, before it is tried again
_SAID_EVERY_S = 10.0  # how many archives have come
_MOST_ARCHIVES = 10**6


class Archive(NamedTuple):
    """An archive behind a URL, and the file that becomes its copy."""

    url: str
    path: Path

    @property
    def record(self) -> Path:
        """The file with the size and the digest of the complete copy."""
        return self.path.with_name(f"{self.path.name}.json")

    @property
    def is_complete(self) -> bool:
        """Whether the file has the size that was downloaded."""
        try:
            found: dict[str, object] = json.loads(self.record.read_text())
            return found["url"] == shown(self.url) and found["bytes"] == self.path.stat().st_size
        except (OSError, ValueError, LookupError, TypeError):
            return False


def is_url(root: Path) -> bool:
    return _URL.fullmatch(str(root)) is not None


def downloaded(root: Path, val_archives: str | None, cache: Path) -> Path:
    """Returns the folder with copies of the archives of a URL, in train/ and val/. Downloads those
    that are missing; other processes of the machine wait.

    root: a URL with {000..009} for numbers. val_archives: of validation, another URL, or relative
    to the first. Raises UserError.
    """
    match = _URL.fullmatch(str(root))
    assert match is not None, root
    url = f"{match[1]}://{match[2]}"
    names = {"train": url, "val": None if val_archives is None else urljoin(url, val_archives)}
    key = hashlib.blake2b(repr(names).encode(), digest_size=12).hexdigest()
    folder = cache / "downloads" / key
    archives: list[Archive] = []
    for split, pattern in names.items():
        if pattern is not None:
            option = "root" if split == "train" else "val_archives"
            archives += _archives(pattern, folder / split, option)
    try:
        with locked(folder, f"downloads the archives of {shown(url)} into {folder}"):
            missing = [archive for archive in archives if not archive.is_complete]
            if missing:
                _download_all(missing, folder)
    except OSError as error:
        raise UserError(
            f"cannot write the copies of the archives: {error}",
            str(folder),
            "data.cache=DIR, a folder that you may write to, with room",
        ) from error
    return folder


def expanded_braces(pattern: str) -> Iterator[str]:
    """Yields the names of a pattern: {000..009} are numbers of as many digits, {a,b} are words."""
    pieces = _BRACES.split(pattern)  # text, braces, text, ...
    choices = [_choices(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
    for words in itertools.product(*choices):
        yield "".join(words)


def shown(url: str) -> str:
    """Returns a URL for messages, without a password and the signature of a query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _choices(braces: str) -> list[str]:
    match = _RANGE.fullmatch(braces)
    if match is None:
        return braces.split(",")
    first = int(match[1])
    numbers = range(first, min(int(match[2]), first + _MOST_ARCHIVES) + 1)
    return [f"{number:0{len(match[1])}d}" for number in numbers]


def _archives(pattern: str, folder: Path, option: str) -> list[Archive]:
    """Returns the archives of a pattern, with file names in their order."""
    urls = list(itertools.islice(expanded_braces(pattern), _MOST_ARCHIVES))
    names = [unquote(urlsplit(url).path).rpartition("/")[2] for url in urls]
    wrong = next((name for name in names if not name.endswith(".tar")), None)
    if wrong is not None or not names:
        raise OptionError(
            f"{short(shown(pattern))} does not name archives .tar",
            option,
            "a URL such as https://host/train-{000..009}.tar",
        )
    if names != sorted(set(names)):
        names = [f"{number:06d}-{name}" for number, name in enumerate(names)]
    return [Archive(url, folder / name) for url, name in zip(urls, names, strict=True)]


def _download_all(archives: list[Archive], folder: Path) -> None:
    """Downloads archives, several at a time. Says how many bytes go where before it begins, and
    how many archives have come."""
    with ThreadPoolExecutor(_AT_A_TIME, "hvdtrain-download") as pool:
        sizes = list(pool.map(lambda archive: _size(archive.url), archives))
        known = sum(size for size in sizes if size is not None)
        count = f"{len(archives)} archive{'s' if len(archives) > 1 else ''}"
        line = f"downloading {count}, {known / 1e6:,.1f} MB, into {folder}"
        print(line, file=sys.stderr, flush=True)
        free = shutil.disk_usage(folder).free
        if known > free:
            raise UserError(
                f"{count} need {known / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB are free",
                str(folder),
                "data.cache=DIR, a folder with room",
            )
        said_s = time.monotonic()
        for number, _ in enumerate(pool.map(_download, archives), start=1):
            if time.monotonic() - said_s >= _SAID_EVERY_S:
                said_s = time.monotonic()
                print(f"downloaded {number} of {count}", file=sys.stderr, flush=True)


def _download(archive: Archive) -> None:
    """Downloads one archive; a file with its name appears once it is complete. Raises UserError."""
    archive.path.parent.mkdir(parents=True, exist_ok=True)
    part = archive.path.with_name(f".{archive.path.name}.part")
    for turn in range(1, _TRIES + 1):
        try:
            record = _copy(archive.url, part)
            break
        except (HTTPException, OSError, EOFError) as error:
            part.unlink(missing_ok=True)
            if turn == _TRIES:
                raise UserError(
                    f"the download failed {_TRIES} times: {first_line(error)}",
                    shown(archive.url),
                    "correct data.root, or start again: complete archives are kept",
                ) from error
    archive.record.write_text(json.dumps(record))
    os.replace(part, archive.path)


def _copy(url: str, path: Path) -> dict[str, object]:
    """Copies a URL to a file; returns its record. Raises EOFError if it is truncated."""
    hashed = hashlib.blake2b(digest_size=32)
    size = 0
    with _opened(url) as (stream, expected), path.open("wb") as file:
        while block := stream.read(_BLOCK_BYTES):
            file.write(block)
            hashed.update(block)
            size += len(block)
    if expected is not None and size != expected:
        raise EOFError(f"it is truncated: {size:,} of {expected:,} bytes came")
    return {"url": shown(url), "bytes": size, "blake2b": hashed.hexdigest()}


@contextmanager
def _opened(url: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """Yields the content of a URL and its size, if the server tells it."""
    if _is_http(url):
        with urllib.request.urlopen(url, timeout=_SILENT_S) as answer:
            length = answer.headers.get("Content-Length")
            yield answer, None if length is None else int(length)
        return
    filesystem, path = _filesystem(url)
    with filesystem.open(path, "rb") as file:
        yield file, filesystem.size(path)


def _size(url: str) -> int | None:
    """Returns the bytes of a URL; None if the server does not tell. The download reports other
    errors."""
    try:
        if not _is_http(url):
            filesystem, path = _filesystem(url)
            found: int | None = filesystem.size(path)
            return found
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=_SILENT_S) as answer:
            length = answer.headers.get("Content-Length")
            return None if length is None else int(length)
    except (OSError, HTTPException):
        return None


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _filesystem(url: str) -> tuple[Any, str]:
    """Returns the file system of fsspec for a URL, and the path in it. Raises UserError."""
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        fix = f"pip install {error.name or 'fsspec'}; or a URL https://"
        raise UserError(f"{shown(url)} needs fsspec: {error}", "data.root", fix) from None
    except ValueError as error:
        what = f"{shown(url)}: {first_line(error)}"
        raise UserError(what, "data.root", "https://, s3://, gs://") from None
    return filesystem, path
