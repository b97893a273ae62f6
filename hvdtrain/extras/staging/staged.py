"""data.stage: a verified copy of the data on each node's local disk. The next start completes an
interrupted copy."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config.read import expand
from hvdtrain.core.extras import data_files
from hvdtrain.data.files.folders import data_root, locked
from hvdtrain.data.files.selection import FileState, Staging
from hvdtrain.data.files.staging import StagedData
from hvdtrain.errors import UserError
from hvdtrain.extras.staging.copying import (
    CopyThread,
    checksum,
    copy_file,
    for_each_file,
    format_bytes,
    list_files,
)

_BLOCK_BYTES = 4096  # block size of a disk: a file occupies whole blocks
_NO_SPACE_FIX = (
    "a larger data.stage, or free space there; or data.stage=null, which reads {source} itself"
)


class Fingerprint(NamedTuple):
    """Fingerprint of a copy. Writing to the copy or replacing it changes at least one of these
    values."""

    size: int
    mtime_ns: int
    ctime_ns: int


# fingerprint of a copy that no longer exists: it equals no other, so the next start copies the file
# again
_NO_FINGERPRINT = Fingerprint(0, 0, 0)


class ManifestEntry(NamedTuple):
    """A line of the manifest: a file that was copied and read back."""

    path: str  # inside the source
    source: FileState
    checksum: str
    fingerprint: Fingerprint


class VerifiedFiles(NamedTuple):
    """The copies whose content is still correct."""

    entries: dict[str, ManifestEntry]
    reread: int  # the number of files that were read to verify them


def stage_data(
    name: str,
    root: Path | None,
    options: dict[str, Any],
    folder: str,
    where: str,
    staging: Staging = Staging(),  # noqa: B008 (it does not change)
) -> StagedData:
    """Copies the files of data set `name` below `folder`, on this node's disk, and returns the root
    and options to build it from there.

    One process of the node copies while the others wait. If the source has no files yet, they are
    downloaded into the stage folder. Raises UserError; `where` is where data.stage was set.
    """
    if not staging.has_files:
        raise UserError(
            f"{name} has no files to stage",
            where,
            "leave data.stage out, or choose another data.name",
        )
    if staging.is_read_once:
        raise UserError(
            f"{name} reads its files only once, at the start, so a copy would not help",
            where,
            "leave data.stage out",
        )
    if staging.is_of_user and root is None:
        return StagedData(root, options)  # building the data set reports the missing root
    source = data_root(root).resolve()
    if staging.may_be_a_file and (source.is_file() or data_files().get(source.suffix) == name):
        what = f"data.stage copies a folder, but data.root is the single file {source.name}"
        raise UserError(
            what, where, "data.root=FOLDER, with this file in it; or leave data.stage out"
        )
    stage = _user_folder(folder, source, where)
    target = stage / f"{name}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:12]}"
    if not ensure_staged(name, source, target, where, staging):
        downloads = not staging.is_of_user and options.get("download", True)
        return StagedData(stage / "download" if downloads else root, options)
    if staging.keeps_decoded:
        options = {"cache": target / "decoded", **options}
    return StagedData(target / "files", options)


def _user_folder(folder: str, source: Path, where: str) -> Path:
    """Returns this user's folder in the stage folder, which users may share. No other user may
    write to it."""
    if not folder:
        raise UserError(
            "data.stage is empty",
            where,
            "a folder on a disk of each node (is the variable set here?), or data.stage=null",
        )
    if "$" in folder:
        what = f"data.stage contains a variable that the shell has not expanded: {folder}"
        raise UserError(what, where, "data.stage=$TMPDIR, without quotes")
    shared = expand(folder, where).absolute()
    if shared.resolve().is_relative_to(source):
        raise UserError(
            f"{shared} is inside the folder of the data, {source}",
            where,
            "a folder on a disk of each node",
        )
    private = shared / f"hvdtrain-{os.geteuid()}"
    try:
        for path in (shared, private):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        status = private.lstat()
    except OSError as error:
        fix = "an existing folder on a disk of each node, that you may write to"
        raise UserError(
            f"cannot stage data on {socket.gethostname()}: {error}", where, fix
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        what = (
            f"{private} belongs to user {status.st_uid}, mode {stat.filemode(status.st_mode)}: "
            "others could change the data"
        )
        raise UserError(what, where, "remove it, or another data.stage")
    return private


# training and validation data are built one after the other, but a process compares source and copy
# only once
@functools.cache
def ensure_staged(name: str, source: Path, target: Path, where: str, staging: Staging) -> bool:
    """Brings target/files up to date with the source. Returns False if the source has no files.
    Raises UserError if there is no room."""
    try:
        asked_s = time.time()
        target.mkdir(mode=0o700, exist_ok=True)
        with locked(target, f"stages {source}"):
            if not _verified_since(target, asked_s):
                files = list_files(source, staging.selections(name, source))
                if not files:
                    return False
                StagedCopy(source, target).update(files)
        return True
    except OSError as error:
        what = f"cannot stage the data on {socket.gethostname()}: {error}"
        raise UserError(what, where, _NO_SPACE_FIX.format(source=source)) from error


def _verified_since(target: Path, asked_s: float) -> bool:
    """Whether another process of this start verified the copy while this process waited for the
    lock."""
    try:
        return (target / "verified").stat().st_mtime >= asked_s
    except FileNotFoundError:
        return False


class StagedCopy:
    """A copy of the folder `source` in the folder `target`.

    files/ holds the copies, manifest.jsonl has a line for each, and partial/ holds files being
    copied. The modification time of `verified` is the time of the last update().
    """

    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        self._files = target / "files"
        self._manifest = target / "manifest.jsonl"
        self._partial = target / "partial"
        self._verified = target / "verified"
        self._host = socket.gethostname()

    def update(self, wanted: Mapping[str, FileState]) -> None:
        """Updates files/ to contain exactly the `wanted` files of the source. Raises UserError,
        OSError."""
        began_s = time.perf_counter()
        self._verified.unlink(missing_ok=True)
        self._files.mkdir(exist_ok=True)
        self._partial.mkdir(exist_ok=True)
        known = self._read_manifest()
        for path in known.keys() - wanted.keys():
            self._remove(path)
        current = {path: entry for path, entry in known.items() if wanted.get(path) == entry.source}
        verified = self._verify(current)
        self._write_manifest(verified.entries.values())
        missing = {path: state for path, state in wanted.items() if path not in verified.entries}
        if missing:
            self._copy(missing, len(verified.entries), began_s)
        elif verified.reread:
            self._print(
                f"{len(wanted):,} staged files are intact, {verified.reread:,} of them were read "
                f"again: {self._files}"
            )
        self._verified.touch()
        os.utime(self._verified, ns=(time.time_ns(), time.time_ns()))

    def _verify(self, current: Mapping[str, ManifestEntry]) -> VerifiedFiles:
        """Returns the copies whose content is correct; reads only those whose fingerprint has
        changed.

        After a reboot it reads all of them, because a crash may lose unwritten data of a renamed
        file.
        """
        same_boot = self._manifest_boot_id() == _boot_id()
        fingerprints = {path: _fingerprint(self._files / path) for path in current}
        intact = {
            path: entry
            for path, entry in current.items()
            if same_boot and fingerprints[path] == entry.fingerprint
        }
        doubtful = []
        for path, entry in current.items():
            fingerprint = fingerprints[path]
            if (
                path not in intact
                and fingerprint is not None
                and fingerprint.size == entry.source.size
            ):
                doubtful.append(path)

        def read_back(path: str, thread: CopyThread) -> None:
            entry = current[path]
            if checksum(self._files / path, thread.buffer) == entry.checksum:
                intact[path] = entry._replace(
                    fingerprint=_fingerprint(self._files / path) or _NO_FINGERPRINT
                )
            thread.files += 1
            thread.bytes += entry.source.size

        def show_progress(files: int, size: int) -> None:
            self._print(f"checking: {files:,} / {len(doubtful):,} files, {format_bytes(size)}")

        for_each_file(doubtful, read_back, self._partial, show_progress)
        # sorted, because the manifest lists them in the order of completion
        changed = sorted(current.keys() - intact.keys())
        if changed:
            more = ", ..." if len(changed) > 1 else ""
            self._print(
                f"{len(changed):,} staged files differ from what was copied, and are copied "
                f"again: {changed[0]}{more}"
            )
        return VerifiedFiles(intact, len(doubtful))

    def _copy(self, missing: Mapping[str, FileState], present: int, began_s: float) -> None:
        """Copies the missing files; a line of the manifest is written as soon as its file is
        complete."""
        self._check_free_space(missing)
        total = sum(state.size for state in missing.values())
        manifest = os.open(self._manifest, os.O_WRONLY | os.O_APPEND)

        def copy(path: str, thread: CopyThread) -> None:
            target = self._files / path
            copied = copy_file(self._source / path, missing[path], target, thread)
            os.write(
                manifest,
                _line(
                    ManifestEntry(
                        path, missing[path], copied, _fingerprint(target) or _NO_FINGERPRINT
                    )
                ),
            )

        def show_progress(files: int, size: int) -> None:
            rate = format_bytes(size / (time.perf_counter() - began_s))
            self._print(
                f"staging: {files:,} / {len(missing):,} files, {format_bytes(size)} / "
                f"{format_bytes(total)} ({rate}/s)"
            )

        try:
            for_each_file(list(missing), copy, self._partial, show_progress)
        except OSError as error:
            what = f"{self._host} ran out of space for the data: {error.strerror}"
            raise UserError(
                what, str(self._files), _NO_SPACE_FIX.format(source=self._source)
            ) from error
        finally:
            os.close(manifest)
            shutil.rmtree(self._partial, ignore_errors=True)
        seconds = time.perf_counter() - began_s
        speed = f"{format_bytes(total)} in {seconds:.1f} s ({format_bytes(total / seconds)}/s)"
        more = f"; {present:,} more were already there" if present else ""
        self._print(
            f"staged {len(missing):,} files, {speed} from {self._source} to {self._files}{more}"
        )

    def _check_free_space(self, missing: Mapping[str, FileState]) -> None:
        needed = sum(-(-state.size // _BLOCK_BYTES) * _BLOCK_BYTES for state in missing.values())
        free = shutil.disk_usage(self._files).free
        if needed > free:
            sizes = (
                f"{len(missing):,} files take {format_bytes(needed)}, {format_bytes(free)} are free"
            )
            what = f"no space for the data on {self._host}: {sizes}"
            raise UserError(
                what, f"data.stage, {self._files}", _NO_SPACE_FIX.format(source=self._source)
            )

    def _manifest_boot_id(self) -> bytes:
        """Returns the boot id at which the manifest was written; empty if there is none."""
        if not self._manifest.exists():
            return b""
        with self._manifest.open("rb") as manifest:
            return manifest.readline().removesuffix(b"\n")

    def _read_manifest(self) -> dict[str, ManifestEntry]:
        entries: dict[str, ManifestEntry] = {}
        lines = self._manifest.read_bytes().splitlines() if self._manifest.exists() else []
        for line in lines[1:]:
            with contextlib.suppress(
                ValueError, TypeError
            ):  # a line that a killed process did not finish
                path, size, mtime_ns, copied, *fingerprint = json.loads(line)
                entries[path] = ManifestEntry(
                    path, FileState(size, mtime_ns), copied, Fingerprint(*fingerprint)
                )
        return entries

    def _write_manifest(self, entries: Iterable[ManifestEntry]) -> None:
        unfinished = self._partial / "manifest"
        unfinished.write_bytes(b"".join([_boot_id() + b"\n", *map(_line, entries)]))
        os.replace(unfinished, self._manifest)

    def _remove(self, path: str) -> None:
        """Removes a file, and the folders that become empty."""
        (self._files / path).unlink(missing_ok=True)
        for folder in list(Path(path).parents)[:-1]:
            with contextlib.suppress(OSError):  # not empty
                (self._files / folder).rmdir()

    def _print(self, message: str) -> None:
        print(f"{self._host}: {message}", file=sys.stderr, flush=True)


def _fingerprint(path: Path) -> Fingerprint | None:
    """Returns the fingerprint of a file; None if there is no regular file."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return (
        Fingerprint(status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if stat.S_ISREG(status.st_mode)
        else None
    )


def _line(entry: ManifestEntry) -> bytes:
    return (
        json.dumps([entry.path, *entry.source, entry.checksum, *entry.fingerprint]).encode() + b"\n"
    )


def _boot_id() -> bytes:
    """Returns an id that changes with every boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b"unknown"
