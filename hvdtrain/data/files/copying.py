"""Many files from one folder to another on several threads: each whole or not there, and read back against its checksum."""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import NamedTuple

from hvdtrain.config.yaml_reader import short
from hvdtrain.errors import UserError

_WORKERS = 8  # they wait for disks and networks, not for cores
_BLOCK_BYTES = 2**22
_SAY_S = 2.0


class File(NamedTuple):
    """A file as its folder tells it."""

    size: int
    mtime_ns: int


class Part(NamedTuple):
    """Files that belong to a data set: those of a folder whose names match, and with `deep` all that is below it."""

    folder: str
    names: str = "*"
    deep: bool = False


@dataclass
class Worker:
    """One thread's place to write, its memory, and how much it has done."""

    spare: Path
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(_BLOCK_BYTES)))
    files: int = 0
    bytes: int = 0


def list_files(root: Path, parts: Sequence[Part]) -> dict[str, File]:
    """{path inside root: file} of what the parts name, in order; hidden names are passed over, links are followed.

    A link may lead out of `root`: its content is copied, as the data set would read it. A circle of links, a link to nothing, and what is
    no file (a pipe would hang) are refused.
    """
    found: dict[str, File] = {}
    for part in parts:
        if (root / part.folder).is_dir():
            found |= _walk(root, part.folder, part, ())
    return dict(sorted(found.items()))


def _walk(root: Path, folder: str, part: Part, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, File]]:
    here = os.stat(root / folder)
    if (here.st_dev, here.st_ino) in above:
        raise UserError("a link leads back to a folder above it", str(root / folder), "remove the link")
    with os.scandir(root / folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = os.path.join(folder, entry.name)
            if entry.is_dir():
                if part.deep:
                    yield from _walk(root, path, part, (*above, (here.st_dev, here.st_ino)))
            elif part.deep or fnmatch.fnmatchcase(entry.name, part.names):
                yield path, _file(root / path)


def _file(path: Path) -> File:
    try:
        seen = os.stat(path)
    except FileNotFoundError:
        raise UserError("a link that leads nowhere", str(path), "remove it, or bring back its file") from None
    if not stat.S_ISREG(seen.st_mode):
        raise UserError("no file, but a pipe, a socket or a device", str(path), "remove it from the data")
    return File(seen.st_size, seen.st_mtime_ns)


def copy(source: Path, wanted: File, target: Path, worker: Worker) -> str:
    """The checksum of a file that is now at `target`, with its time; what is read back from the disk has it too."""
    import xxhash

    hashed, part = xxhash.xxh3_128(), worker.spare
    part.unlink(missing_ok=True)  # left by a process that was killed
    with source.open("rb", buffering=0) as file, part.open("xb") as out:
        while count := file.readinto(worker.buffer):
            hashed.update(worker.buffer[:count])
            out.write(worker.buffer[:count])
            worker.bytes += count
        out.flush()
        seen = os.fstat(file.fileno())
        if (File(seen.st_size, seen.st_mtime_ns), out.tell()) != (wanted, wanted.size):
            raise UserError("changed while it was copied", str(source), "start again when nobody writes to the data any more")
        os.utime(part, ns=(seen.st_mtime_ns, seen.st_mtime_ns))
        _leave_memory(out.fileno())
    if checksum(part, worker.buffer) != hashed.hexdigest():
        raise OSError(errno.EIO, "what is read back differs from what was written", str(part))
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, target)
    worker.files += 1
    return hashed.hexdigest()


def _leave_memory(descriptor: int) -> None:
    """The next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def checksum(path: Path, buffer: memoryview) -> str:
    """xxh3, 128 bits: about 10 GB/s, so that the disk sets the pace."""
    import xxhash

    hashed = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hashed.update(buffer[:count])
    return hashed.hexdigest()


def on_threads(paths: Sequence[str], work: Callable[[str, Worker], None], spare: Path, say: Callable[[int, int], None]) -> None:
    """work(path, worker) for every path; say(files, bytes done) every 2 s. What one of them raises ends all."""
    workers = [Worker(spare / f"{number}.part") for number in range(min(_WORKERS, len(paths)))]
    stop = Event()

    def run(first: int) -> None:
        for path in paths[first :: len(workers)]:
            if stop.is_set():
                return
            try:
                work(path, workers[first])
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                what = f"cannot be copied: {error.strerror or error}"
                raise UserError(f"{short(path)} {what}", str(error.filename or path), "mend what is named; what is copied stays") from error

    with ThreadPoolExecutor(max(1, len(workers))) as pool:
        futures = [pool.submit(run, first) for first in range(len(workers))]
        try:
            while wait(futures, _SAY_S, FIRST_EXCEPTION).not_done and not any(f.done() and f.exception() for f in futures):
                say(sum(worker.files for worker in workers), sum(worker.bytes for worker in workers))
        finally:
            stop.set()
    for future in futures:
        future.result()


def size_words(size: float) -> str:
    """1.2 GB, 390 MB, 12 kB, 7 bytes."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}" if size < 100 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} bytes"
