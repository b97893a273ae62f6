"""Where data lies, and how one process brings it there while the others wait."""

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

from hvdtrain.config.read import expand
from hvdtrain.errors import UserError

_STAGING = ".hvdtrain-download"  # inside the root, so that a rename out of it is atomic


def cache_root() -> Path:
    """$XDG_CACHE_HOME/hvdtrain, or ~/.cache/hvdtrain."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else expand("~/.cache", "$XDG_CACHE_HOME")) / "hvdtrain"


def data_root(root: Path | None) -> Path:
    """The user's data.root, or `data` in the cache."""
    return cache_root() / "data" if root is None else expand(root, "data.root")


@contextmanager
def alone(folder: Path, work: str) -> Iterator[None]:
    """One process at a time is in this block for `folder` (made if absent); the others say once, after 2 s, that they wait for `work`."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".hvdtrain.lock")
    try:
        lock.acquire(timeout=2.0)
    except Timeout:
        print(f"waiting for another process on this machine: {work}", file=sys.stderr, flush=True)
        lock.acquire()  # the system gives it up with its holder, however that one ends
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True)
class Wanted:
    """Files of a data set that are not there yet."""

    name: str
    root: Path
    files: Sequence[str]  # paths inside root
    fix: str  # how a user gets them by hand

    def missing(self) -> list[str]:
        return [file for file in self.files if not (self.root / file).is_file()]

    def refusal(self, reason: str) -> UserError:
        files = ", ".join(self.missing() or self.files)
        return UserError(f"the files of {self.name} are missing, and {reason}", f"{self.root}: {files}", self.fix)


def download(wanted: Wanted, pull: Callable[[Path], None], timeout_s: float = 20.0) -> None:
    """Bring the wanted files into their root: one process calls `pull(staging folder)`, the others wait and find them there.

    A file comes whole, by a rename, and never over one that is there. A connection silent for `timeout_s` ends the attempt; every failure
    is a UserError that names files and folder.
    """
    try:
        with alone(wanted.root, f"it downloads {wanted.name} into {wanted.root}"):
            if wanted.missing():
                print(f"downloading {wanted.name} into {wanted.root}", file=sys.stderr, flush=True)
                _pull_and_place(wanted, pull, timeout_s)
    except (OSError, HTTPException, EOFError, RuntimeError, UserError) as error:  # torchvision gives up with a RuntimeError
        raise wanted.refusal(f"the download failed: {' '.join(str(error).split())}") from error


def _pull_and_place(wanted: Wanted, pull: Callable[[Path], None], timeout_s: float) -> None:
    staging = wanted.root / _STAGING
    shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed
    staging.mkdir()
    try:
        with _socket_timeout(timeout_s):
            pull(staging)
        for file in wanted.missing():
            (wanted.root / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / file, wanted.root / file)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _socket_timeout(timeout_s: float) -> Iterator[None]:
    """For every socket of this process: torchvision opens its own, and gives none a limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout_s)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
