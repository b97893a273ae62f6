"""Downloading the files of a data set: by one process of a machine, each file whole or absent."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from hvdtrain.data.files.lock import locked
from hvdtrain.errors import UserError

_DOWNLOADS = ".hvdtrain-download"  # inside the root, so that a rename out of it is atomic


class FilesMissing(UserError):
    """Files of a data set are not there, and were not downloaded."""


@dataclass(frozen=True)
class RequiredFiles:
    """The files of a data set, and how a user gets them by hand."""

    name: str
    root: Path
    files: Sequence[str]  # paths inside root
    fix: str

    def missing(self) -> list[str]:
        return [file for file in self.files if not (self.root / file).is_file()]

    def missing_error(self, reason: str) -> FilesMissing:
        """The error that names the missing files, and why they cannot be downloaded."""
        files = ", ".join(self.missing() or self.files)
        return FilesMissing(f"the files of {self.name} are missing, and {reason}", f"{self.root}: {files}", self.fix)


def download(required: RequiredFiles, fetch: Callable[[Path], None], timeout_s: float = 20.0) -> None:
    """Brings the missing files into their root: one process calls fetch(empty folder), the others wait for it.

    A file appears by a rename, complete, and replaces none that is there. A connection that is silent for `timeout_s` ends the attempt.
    Raises UserError, with the names of files and folder, where the download fails.
    """
    try:
        with locked(required.root, f"downloads {required.name} into {required.root}"):
            if required.missing():
                print(f"downloading {required.name} into {required.root}", file=sys.stderr, flush=True)
                _fetch_and_place(required, fetch, timeout_s)
    except (OSError, HTTPException, EOFError, RuntimeError, UserError) as error:  # torchvision gives up with a RuntimeError
        raise required.missing_error(f"the download failed: {' '.join(str(error).split())}") from error


def _fetch_and_place(required: RequiredFiles, fetch: Callable[[Path], None], timeout_s: float) -> None:
    folder = required.root / _DOWNLOADS
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
    folder.mkdir()
    try:
        with _socket_timeout(timeout_s):
            fetch(folder)
        for file in required.missing():
            (required.root / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / file, required.root / file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _socket_timeout(timeout_s: float) -> Iterator[None]:
    """For every socket of this process: torchvision opens its own without a timeout."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout_s)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
