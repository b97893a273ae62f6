"""The folder of wheels that were built here, and which of them may be installed: what this user or root built, and nobody changed."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from hvdtrain.errors import UserError

RECORD = "SHA256SUMS"  # of the wheel beside it, as sha256sum writes it

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """The folder of all wheels that were built here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain" / "horovod"


def private_folder(folder: Path, report: Callable[[str], None]) -> None:
    """Makes a folder in which only this user can write. Where others could, its wheels are removed: anyone may have put them there.

    Raises UserError for a link, for no folder, and for one that belongs to another user.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(
            "the cache of Horovod's wheels is a link, not a folder", str(folder), "remove it, or point XDG_CACHE_HOME elsewhere"
        )
    if not _of_this_user_or_root(found):
        what = f"the cache of Horovod's wheels belongs to user {found.st_uid}, who could put any program in it; this is user {os.geteuid()}"
        raise UserError(what, str(folder), "point XDG_CACHE_HOME at a folder of your own")
    if found.st_mode & _OTHERS_WRITE:
        report(f"others can write in {folder}: its wheels are removed, and only you can write there now")
        folder.chmod(0o700)
        for wheel in folder.glob("*.whl"):
            wheel.unlink()


def usable_wheel(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The wheel in a private folder; None where there is none, and where it is not the one that was built: that one is removed."""
    for wheel in folder.glob("horovod-*.whl"):
        if (reason := _refused_because(wheel)) is None:
            return wheel
        report(f"not used and removed: {wheel}: {reason}")
        wheel.unlink()
    return None


def record(wheel: Path) -> None:
    """Records the sha256 of a wheel that was built just now, for usable_wheel()."""
    wheel.chmod(0o600)
    fresh = wheel.parent / f"{RECORD}.unfinished"
    fresh.write_text(f"{_sha256(wheel)}  {wheel.name}\n")
    fresh.replace(wheel.parent / RECORD)


def _refused_because(wheel: Path) -> str | None:
    found = wheel.lstat()
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if not _of_this_user_or_root(found):
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        return "others can write it"
    try:
        recorded = (wheel.parent / RECORD).read_text()
    except OSError:
        return f"there is no {RECORD} beside it"
    return None if f"{_sha256(wheel)}  {wheel.name}\n" == recorded else f"its sha256 is not that of {RECORD}"


def _of_this_user_or_root(found: os.stat_result) -> bool:
    return found.st_uid in (os.geteuid(), 0)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
