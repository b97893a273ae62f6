"""Disk space for checkpoints: reports what is missing, and selects the older checkpoint that a
job's last one may replace."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.training.checkpoint import files, prune
from hvdtrain.training.checkpoint.files import Damaged

NO_ROOM = "no room on the disk"
NO_MEMORY = "out of memory"
_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_BESIDE_ARRAYS_BYTES = 2**14  # headers, progress.json, SHA256SUMS


def needed_bytes(array_bytes: int) -> int:
    """Returns the bytes that a checkpoint with `array_bytes` of arrays needs."""
    return array_bytes + _BESIDE_ARRAYS_BYTES


def describe(error: OSError, run: Path, needed: int) -> str:
    """Returns why a checkpoint of `needed` bytes was not written: "no room on the disk: needs 1.412
    MB, 0.310 MB free"."""
    if error.errno not in _ERRORS:
        return f"{error.strerror or error}"
    free = free_bytes(run)
    quota = "" if free is None or free < needed else ", but a quota leaves less"
    return f"{NO_ROOM}: needs {_megabytes(needed)}" + (
        "" if free is None else f", {_megabytes(free)} free{quota}"
    )


def _megabytes(size: int) -> str:
    """Formats bytes as megabytes; small sizes to the kilobyte, because needed and free bytes may be
    close."""
    return f"{size / 1e6:.{1 if size >= 1e7 else 3}f} MB"


def free_bytes(run: Path) -> int | None:
    """Returns the free bytes on a folder's disk; None if its file system does not report them."""
    try:
        usage = shutil.disk_usage(run)
    except OSError:
        return None
    return usage.free if usage.total else None


def cannot_write(error: OSError, where: str) -> UserError:
    """Returns the error for a run folder whose first files cannot be written."""
    if error.errno in _ERRORS:
        return UserError(
            f"cannot write the run folder: {NO_ROOM}",
            where,
            "make room, or give run= a folder on another disk",
        )
    return UserError(
        f"cannot write the run folder: {error}", where, "give run= a folder that can be written"
    )


def check_room(run: Path, needed: int) -> None:
    """Raises UserError if a checkpoint of `needed` bytes does not fit on the disk."""
    free = free_bytes(run)
    if free is not None and free < needed:
        fix = "make room, or give run= a folder on another disk"
        raise UserError(
            f"{NO_ROOM} for a checkpoint: needs {_megabytes(needed)}, {_megabytes(free)} free",
            str(run),
            fix,
        )


def give_up_one(run: Path, needed: int, keep_best: int, limit_bytes: int) -> int | None:
    """Removes the oldest checkpoint before the newest good one, checkpoints to keep last; returns
    its step.

    None if nothing is removed: there is none before it, or all of them together would not be
    enough. limit_bytes: as read_arrays().
    """
    older = _before_the_newest_good(run, limit_bytes)
    free = free_bytes(run)
    if not older or free is None or free + sum(map(_size, older)) < needed - _BESIDE_ARRAYS_BYTES:
        return None
    kept = {*prune.best(older, keep_best), *prune.asked_for(older)}
    given_up = next((folder for folder in older if folder not in kept), older[0])
    files.remove(given_up)
    return int(given_up.name.removeprefix("step-").removesuffix(files.ASIDE))


def _before_the_newest_good(run: Path, limit_bytes: int) -> list[Path]:
    """Returns the checkpoints before the newest good one, by step; empty if none is good."""
    folders = files.finished(run)
    for place in reversed(range(len(folders))):
        try:
            files.read_numbers(folders[place])
            # only verifies their checksums
            files.read_arrays(folders[place], limit_bytes, names=())
            return folders[:place]
        except Damaged:
            continue
    return []


def _size(folder: Path) -> int:
    """Returns the size on disk."""
    return sum(512 * entry.stat(follow_symlinks=False).st_blocks for entry in os.scandir(folder))
