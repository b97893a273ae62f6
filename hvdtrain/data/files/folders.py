"""Folders of data sets and caches: their paths, locks, and downloads that appear complete or not at
all."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from hvdtrain.config.read import expand
from hvdtrain.data.option_error import OptionError, expanded
from hvdtrain.errors import UserError


def cache_root() -> Path:
    """Returns $XDG_CACHE_HOME/hvdtrain, or ~/.cache/hvdtrain."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # unset, or relative, which the XDG standard says to ignore
        base = expand("~/.cache", "$XDG_CACHE_HOME")
    return base / "hvdtrain"


def data_root(root: Path | None) -> Path:
    """Returns the user's data.root, or `data` in the cache. Raises UserError if ~user is
    unknown."""
    return cache_root() / "data" if root is None else expanded(root, "root")


def check_folder(root: Path, fix: str) -> None:
    """Raises UserError if data.root does not exist or is a file; OSError if it cannot be
    accessed."""
    try:
        is_folder = stat.S_ISDIR(root.stat().st_mode)
    except FileNotFoundError:
        raise OptionError(f"{root} does not exist", "root", fix) from None
    if not is_folder:
        raise OptionError(f"{root} is not a folder", "root", fix)


# errors of flock() on a file system without locks
NO_LOCKS = (
    errno.ENOLCK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
)
_SILENT_S = 2.0
_FIX = (
    "a folder on a local disk by data.cache=, data.stage= or $XDG_CACHE_HOME; or mount it with "
    "locks (NFS: lockd, Lustre: -o flock)"
)


@contextmanager
def locked(folder: Path, work: str) -> Iterator[None]:
    """Holds the lock of `folder`, which is created if absent. A process that has waited for 2 s
    prints once that another process does `work`.

    The system releases the lock when the process ends, even if it is killed. Raises OSError, and
    UserError if the file system does not support locks.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".hvdtrain.lock")
    try:
        lock.acquire(timeout=_SILENT_S)
    except Timeout:
        print(
            f"waiting for another process on this machine: it {work}", file=sys.stderr, flush=True
        )
        lock.acquire()
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise UserError(
                f"the file system of {folder} has no locks: {error.strerror}", str(folder), _FIX
            ) from None
        raise
    try:
        yield
    finally:
        lock.release()


_DOWNLOADS = ".hvdtrain-download"  # inside the root, so that a rename out of it is atomic


class FilesMissing(UserError):
    """Raised when files of a data set are missing and were not downloaded."""


@dataclass(frozen=True)
class RequiredFiles:
    """The files of a data set, and how to get them by hand."""

    name: str
    root: Path
    files: Sequence[str]  # paths inside root
    fix: str

    def missing(self) -> list[str]:
        return [file for file in self.files if not (self.root / file).is_file()]

    def missing_error(self, reason: str) -> FilesMissing:
        """Returns the error that names the missing files and why they cannot be downloaded."""
        files = ", ".join(self.missing() or self.files)
        return FilesMissing(
            f"the files of {self.name} are missing, and {reason}", f"{self.root}: {files}", self.fix
        )


def download(
    required: RequiredFiles, fetch: Callable[[Path], None], timeout_s: float = 20.0
) -> None:
    """Downloads missing files into their root: one process calls fetch(empty folder), and the
    others wait for it.

    A complete file is moved into place and never replaces an existing one. The attempt ends if a
    connection is silent for `timeout_s`. If the download fails, raises UserError with the names of
    the files and the folder.
    """
    try:
        with locked(required.root, f"downloads {required.name} into {required.root}"):
            if required.missing():
                print(
                    f"downloading {required.name} into {required.root}", file=sys.stderr, flush=True
                )
                _fetch_and_place(required, fetch, timeout_s)
    except (
        OSError,
        HTTPException,
        EOFError,
        RuntimeError,
        UserError,
    ) as error:  # torchvision gives up with a RuntimeError
        raise required.missing_error(
            f"the download failed: {' '.join(str(error).split())}"
        ) from error


def _fetch_and_place(
    required: RequiredFiles, fetch: Callable[[Path], None], timeout_s: float
) -> None:
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
    """Sets a timeout for every socket of this process, since torchvision sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout_s)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
