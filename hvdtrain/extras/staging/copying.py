"""Copies many files on several threads. A copy is complete or absent, and is read back to compare
checksums."""

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

from hvdtrain.data.files.selection import FileSelection, FileState
from hvdtrain.errors import UserError, short

_THREADS = 8  # they mostly wait for disks and networks, not for cores
_BLOCK_BYTES = 2**22
_PROGRESS_S = 2.0


@dataclass
class CopyThread:
    """The buffer and the progress of one thread."""

    partial: Path  # the file being copied
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(_BLOCK_BYTES)))
    files: int = 0
    bytes: int = 0


def list_files(root: Path, selections: Sequence[FileSelection]) -> dict[str, FileState]:
    """Returns {path inside root: state} of the selected files, sorted by path. Hidden names are
    skipped, links are followed.

    A link may lead out of `root`; its content is copied. Raises OSError, and UserError for a circle
    of links, a broken link, or anything but a regular file (reading a pipe would hang).
    """
    files: dict[str, FileState] = {}
    for selection in selections:
        if (root / selection.folder).is_dir():
            files |= _walk(root, selection.folder, selection, ())
    return dict(sorted(files.items()))


def _walk(
    root: Path, folder: str, selection: FileSelection, parents: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, FileState]]:
    """`parents` are (device, inode) of the folders above `folder`."""
    this = os.stat(root / folder)
    if (this.st_dev, this.st_ino) in parents:
        raise UserError(
            "a link leads back to a folder above it", str(root / folder), "remove the link"
        )
    with os.scandir(root / folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = os.path.join(folder, entry.name)
            if entry.is_dir():
                if selection.recursive:
                    yield from _walk(root, path, selection, (*parents, (this.st_dev, this.st_ino)))
            elif selection.recursive or fnmatch.fnmatchcase(entry.name, selection.pattern):
                yield path, _file_state(root / path)


def _file_state(path: Path) -> FileState:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise UserError(
            "a link to a file that does not exist",
            str(path),
            "remove the link, or restore its file",
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(
            "not a regular file, but a pipe, a socket or a device",
            str(path),
            "remove it from the data",
        )
    return FileState(status.st_size, status.st_mtime_ns)


def copy_file(source: Path, expected: FileState, target: Path, thread: CopyThread) -> str:
    """Copies a file with its modification time, reads the copy back from the disk, and returns its
    checksum.

    Raises UserError if the file is not in the `expected` state at the end of the copy. Raises
    OSError, also if the copy differs when it is read back.
    """
    import xxhash

    hashed = xxhash.xxh3_128()
    partial = thread.partial
    partial.unlink(missing_ok=True)  # left by a process that was killed
    with source.open("rb", buffering=0) as file, partial.open("xb") as out:
        while count := file.readinto(thread.buffer):
            hashed.update(thread.buffer[:count])
            out.write(thread.buffer[:count])
            thread.bytes += count
        out.flush()
        status = os.fstat(file.fileno())
        if FileState(status.st_size, status.st_mtime_ns) != expected or out.tell() != expected.size:
            raise UserError(
                "changed while it was copied",
                str(source),
                "start again once no process writes to the data",
            )
        os.utime(partial, ns=(status.st_mtime_ns, status.st_mtime_ns))
        _drop_from_page_cache(out.fileno())
    if checksum(partial, thread.buffer) != hashed.hexdigest():
        raise OSError(
            errno.EIO,
            "the copy read back from the disk differs from what was written",
            str(partial),
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(partial, target)
    thread.files += 1
    return hashed.hexdigest()


def _drop_from_page_cache(descriptor: int) -> None:
    """Drops the file from the page cache, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def checksum(path: Path, buffer: memoryview) -> str:
    """Returns the 128-bit XXH3 as hex digits. It runs at about 10 GB/s, so the disk is the
    limit."""
    import xxhash

    hashed = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hashed.update(buffer[:count])
    return hashed.hexdigest()


def for_each_file(
    paths: Sequence[str],
    work: Callable[[str, CopyThread], None],
    folder: Path,
    show_progress: Callable[[int, int], None],
) -> None:
    """Calls work(path, thread) for every path, on several threads that write below `folder`, and
    show_progress(files, bytes done) every 2 s.

    The first error ends all threads and is raised: OSError if the disk or a quota is full,
    UserError for any other OSError of a file.
    """
    threads = [CopyThread(folder / f"{number}.part") for number in range(min(_THREADS, len(paths)))]
    stop = Event()

    def run(first: int) -> None:
        for path in paths[first :: len(threads)]:
            if stop.is_set():
                return
            try:
                work(path, threads[first])
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                what = f"{short(path)} cannot be copied: {error.strerror or error}"
                raise UserError(
                    what,
                    str(error.filename or path),
                    "repair what is named; the files copied so far are kept",
                ) from error

    with ThreadPoolExecutor(max(1, len(threads))) as pool:
        futures = [pool.submit(run, first) for first in range(len(threads))]
        try:
            while wait(futures, _PROGRESS_S, FIRST_EXCEPTION).not_done and not any(
                f.done() and f.exception() for f in futures
            ):
                show_progress(
                    sum(thread.files for thread in threads), sum(thread.bytes for thread in threads)
                )
        finally:
            stop.set()
    for future in futures:
        future.result()


def format_bytes(size: float) -> str:
    """Formats bytes, as in 1.2 GB, 390 MB, 12.0 kB, 7 bytes."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return (
                f"{size / scale:.1f} {unit}" if size < 100 * scale else f"{size / scale:.0f} {unit}"
            )
    return f"{size:.0f} bytes"
