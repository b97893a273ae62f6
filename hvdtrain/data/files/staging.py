"""data.stage: a copy of the data on each node's own disk, made once, checked, and gone on with where it broke off."""

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
from hvdtrain.data.files.copying import File, Part, Worker, checksum, copy, list_files, on_threads, size_words
from hvdtrain.data.files.download import alone, data_root
from hvdtrain.errors import UserError

_NO_FILES = ("digits", "synthetic")
_OWN = ("folder", "webdataset")  # images of the user: nobody downloads them, and what is made of them has its own place
_PARTS: dict[str, tuple[Part, ...]] = {  # what a data set reads below its root; any other reads all of it
    **{
        name: (Part(f"{folder}/raw", "*-ubyte*"), Part("", "*-ubyte*"))
        for name, folder in {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "kmnist": "KMNIST"}.items()
    },
    "cifar10": (Part("cifar-10-batches-bin", "*.bin"),),
    "cifar100": (Part("cifar-100-binary", "*.bin"),),
}
_BLOCK_BYTES = 4096  # of a disk: a file takes whole ones
_STAY_FIX = "a larger data.stage, or room there; or data.stage=null, which reads {source} itself"


class Kept(NamedTuple):
    """A line of the manifest: a file that was copied and read back."""

    path: str
    source: File
    checksum: str
    mark: tuple[int, int, int]  # size, mtime and ctime of the copy: whatever writes to it or replaces it changes one


def stage_data(name: str, root: Path | None, options: dict[str, Any], folder: str, where: str) -> tuple[Path | None, dict[str, Any]]:
    """(the root to read from, the options of the data set): those of a copy below `folder`, on this node.

    One process of a node copies what is not there, the others wait. Data that is nowhere yet is downloaded to there.
    """
    if name in _NO_FILES:
        raise UserError(f"{name} has no files, there is nothing to stage", where, "leave data.stage out, or choose another data.name")
    if name in _OWN and root is None:
        return root, options  # the data set itself says what it needs
    source = data_root(root).resolve()
    own = _own_folder(folder, source, where)
    target = own / f"{name}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:12]}"
    if not _staged(name, source, target, where):
        downloads = name not in _OWN and options.get("download", True)
        return (own / "download" if downloads else root), options
    return target / "files", {"cache": target / "decoded", **options} if name in _OWN else options


def _own_folder(folder: str, source: Path, where: str) -> Path:
    """This user's folder in the stage folder, which others may share: nobody else can have put anything into it."""
    if not folder:
        raise UserError("data.stage is empty", where, "a folder on a disk of each node (is the variable set here?), or data.stage=null")
    if "$" in folder:
        raise UserError(f"no variable is looked up in {folder}", where, "let the shell write it out: data.stage=$TMPDIR, without quotes")
    stage = expand(folder, where).absolute()
    if stage.resolve().is_relative_to(source):
        raise UserError(f"{stage} lies inside the data themselves, {source}", where, "a folder on a disk of each node")
    own = stage / f"hvdtrain-{os.geteuid()}"
    try:
        for part in (stage, own):
            with contextlib.suppress(FileExistsError):
                part.mkdir(mode=0o700)
        seen = own.lstat()
    except OSError as error:
        fix = "an existing folder on a disk of each node, that you may write to"
        raise UserError(f"cannot stage data on {socket.gethostname()}: {error}", where, fix) from None
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o022:
        what = f"{own} belongs to user {seen.st_uid}, mode {stat.filemode(seen.st_mode)}: others could change the data"
        raise UserError(what, where, "remove it, or another data.stage")
    return own


@functools.cache  # the parts of a data set are read one after the other: one look for each process
def _staged(name: str, source: Path, target: Path, where: str) -> bool:
    """Whether the source has files; they are in target/files then."""
    try:
        asked_s = time.time()
        target.mkdir(mode=0o700, exist_ok=True)
        with alone(target, f"it stages {source}"):
            if not _looked_at_since(target, asked_s):
                files = list_files(source, _parts(name, source))
                if not files:
                    return False
                _Stage(source, target).bring(files)
        return True
    except OSError as error:
        host = socket.gethostname()
        raise UserError(f"cannot stage the data on {host}: {error}", where, _STAY_FIX.format(source=source)) from error


def _parts(name: str, source: Path) -> tuple[Part, ...]:
    if name not in _OWN:
        return _PARTS.get(name, (Part("", deep=True),))
    loose = name == "webdataset"  # archives lie in train/, or are train-*.tar
    held = (split for split in ("val", "validation", "test") if (source / split).is_dir() or (loose and any(source.glob(f"{split}-*"))))
    splits = ("train", next(held, "val"))
    return tuple(Part(split, deep=not loose) for split in splits) + tuple(Part("", f"{split}-*") for split in splits if loose)


def _looked_at_since(target: Path, asked_s: float) -> bool:
    """Whether another process has made sure of the copy while this one waited: a rank of the same start."""
    try:
        return (target / "looked").stat().st_mtime >= asked_s
    except FileNotFoundError:
        return False


class _Stage:
    """A copy of `source`: files/, manifest.jsonl with a line for each file, and part/ for what is under way."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.files, self.manifest, self.part = source, target / "files", target / "manifest.jsonl", target / "part"
        self.looked, self.host, self.fix = target / "looked", socket.gethostname(), _STAY_FIX.format(source=source)

    def bring(self, wanted: Mapping[str, File]) -> None:
        """What is wanted is there afterwards, and nothing else that was ever copied."""
        begun = time.perf_counter()
        self.looked.unlink(missing_ok=True)
        for folder in (self.files, self.part):
            folder.mkdir(exist_ok=True)
        known, same_boot = self._read()
        for path in known.keys() - wanted.keys():
            self._remove(path)
        current = {path: kept for path, kept in known.items() if wanted.get(path) == kept.source}
        good, reread = self._whole(current, same_boot)
        self._write(good.values())
        missing = [path for path in wanted if path not in good]
        if missing:
            self._copy(missing, wanted, begun, len(good))
        elif reread:
            self._say(f"{len(wanted):,} staged files are whole, {reread:,} of them were read again: {self.files}")
        self.looked.touch()
        os.utime(self.looked, ns=(time.time_ns(), time.time_ns()))

    def _whole(self, current: Mapping[str, Kept], same_boot: bool) -> tuple[dict[str, Kept], int]:
        """The copies that are as they were; the bytes of those whose mark has changed, or after a restart of the machine all, are read."""
        marks = {path: _mark(self.files / path) for path in current}
        good = {path: kept for path, kept in current.items() if same_boot and marks[path] == kept.mark}
        doubtful = [path for path, kept in current.items() if path not in good and (marks[path] or (-1,))[0] == kept.source.size]

        def read(path: str, worker: Worker) -> None:
            found = checksum(self.files / path, worker.buffer)
            if found == current[path].checksum:
                good[path] = current[path]._replace(mark=_mark(self.files / path) or (0, 0, 0))
            worker.files, worker.bytes = worker.files + 1, worker.bytes + current[path].source.size

        on_threads(
            doubtful, read, self.part, lambda files, size: self._say(f"checking: {files:,} / {len(doubtful):,} files, {size_words(size)}")
        )
        if lost := [path for path in current if path not in good]:
            self._say(f"{len(lost):,} staged files are not what was copied, and are copied again: {lost[0]}{', ...' * (len(lost) > 1)}")
        return good, len(doubtful)

    def _copy(self, missing: list[str], wanted: Mapping[str, File], begun: float, there: int) -> None:
        total = sum(wanted[path].size for path in missing)
        self._check_room(missing, wanted)
        log = os.open(self.manifest, os.O_WRONLY | os.O_APPEND)

        def work(path: str, worker: Worker) -> None:
            target = self.files / path
            kept = Kept(path, wanted[path], copy(self.source / path, wanted[path], target, worker), _mark(target) or (0, 0, 0))
            os.write(log, _line(kept))

        def say(files: int, size: int) -> None:
            rate = size_words(size / (time.perf_counter() - begun))
            self._say(f"staging: {files:,} / {len(missing):,} files, {size_words(size)} / {size_words(total)} ({rate}/s)")

        try:
            on_threads(missing, work, self.part, say)
        except OSError as error:
            raise UserError(f"{self.host} ran out of room for the data: {error.strerror}", str(self.files), self.fix) from error
        finally:
            os.close(log)
            shutil.rmtree(self.part, ignore_errors=True)
        seconds = time.perf_counter() - begun
        more = f"; {there:,} more were there" if there else ""
        rate = size_words(total / seconds)
        self._say(
            f"staged {len(missing):,} files, {size_words(total)} in {seconds:.1f} s ({rate}/s) from {self.source} to {self.files}{more}"
        )

    def _check_room(self, missing: list[str], wanted: Mapping[str, File]) -> None:
        need = sum(-(-wanted[path].size // _BLOCK_BYTES) * _BLOCK_BYTES for path in missing)
        free = shutil.disk_usage(self.files).free
        if need > free:
            what = f"no room for the data on {self.host}: {len(missing):,} files take {size_words(need)}, {size_words(free)} are free"
            raise UserError(what, f"data.stage, {self.files}", self.fix)

    def _read(self) -> tuple[dict[str, Kept], bool]:
        """The manifest's files, and whether the machine has run since: unwritten data of a crash may be lost under a whole file's name."""
        known: dict[str, Kept] = {}
        lines = self.manifest.read_bytes().splitlines() if self.manifest.exists() else []
        for line in lines[1:]:
            with contextlib.suppress(ValueError, TypeError):  # a line that a killed process has not finished
                path, size, mtime_ns, checked, *mark = json.loads(line)
                known[path] = Kept(path, File(size, mtime_ns), checked, (mark[0], mark[1], mark[2]))
        return known, bool(lines) and lines[0] == _boot()

    def _write(self, kept: Iterable[Kept]) -> None:
        unfinished = self.part / "manifest"
        unfinished.write_bytes(b"".join([_boot() + b"\n", *map(_line, kept)]))
        os.replace(unfinished, self.manifest)

    def _remove(self, path: str) -> None:
        (self.files / path).unlink(missing_ok=True)
        for folder in list(Path(path).parents)[:-1]:
            with contextlib.suppress(OSError):  # not empty
                (self.files / folder).rmdir()

    def _say(self, words: str) -> None:
        print(f"{self.host}: {words}", file=sys.stderr, flush=True)


def _mark(copy_: Path) -> tuple[int, int, int] | None:
    """What changes with whatever is done to a file; None where there is none."""
    try:
        seen = copy_.lstat()
    except FileNotFoundError:
        return None
    return (seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns) if stat.S_ISREG(seen.st_mode) else None


def _line(kept: Kept) -> bytes:
    return json.dumps([kept.path, *kept.source, kept.checksum, *kept.mark]).encode() + b"\n"


def _boot() -> bytes:
    """This start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b"unknown"
