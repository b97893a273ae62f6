"""Images that are decoded once, into memory-mapped array files of bounded size. Only missing files
are decoded again."""

from __future__ import annotations

import errno
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import IO, TYPE_CHECKING

import numpy as np

from hvdtrain.data.files.folders import locked
from hvdtrain.data.labels import read_labels
from hvdtrain.data.source import ArraySource, LabelledImages, check_indices
from hvdtrain.data.worker_pool import WorkerPool
from hvdtrain.errors import UserError
from hvdtrain.extras.image_files.image_source import ImageSource
from hvdtrain.extras.image_files.npy import (
    MOST_ROWS,
    CheckedArray,
    checksums,
    load_checked,
    rows_of_block,
    write_checksums,
    write_npy,
)

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

# bytes of pixels in a file: an interrupted packing loses the work for one file at most
_SHARD_BYTES = 2**30
_PROGRESS_S = 2.0
_FLUSH_S = 0.25
# a thread decodes and writes at most this many bytes, and at most MOST_ROWS images, at a time
_BLOCK_BYTES = 2**22
_MOST_THREADS = 16  # most threads, or worker processes
# blocks of small images that a thread requests from worker processes at a time
_BLOCKS_FOR_WORKERS = 4
# number of images from which processes are worth their startup time
_WORTH_WORKERS = 20_000
_WORTH_WORKERS_OF_LARGE = 2_000


def pack(
    images: ImageSource,
    folder: Path,
    shard_bytes: int = _SHARD_BYTES,
    worth_workers: int | None = None,
) -> LabelledImages:
    """Returns the images from array files in `folder`; one process of the machine decodes missing
    ones, and the others wait.

    Uses one file and an ArraySource if the pixels take at most `shard_bytes`, else several files
    and a PackedSource. At least `worth_workers` images are decoded by processes (None: the number
    at which starting them pays off), fewer by threads. Raises UserError if an image cannot be
    decoded or the files cannot be written.
    """
    shape = images.shape
    rows = max(1, shard_bytes // math.prod(shape))
    count = -(-len(images) // rows)
    shards = []
    for number in range(count):
        name = "images.npy" if count == 1 else f"images-{number:05}-of-{count:05}.npy"
        start = number * rows
        shards.append(
            _Shard(
                folder / name, start, (min(rows, len(images) - start), *shape), is_only=count == 1
            )
        )
    arrays = _load_or_decode(images, shards, folder, worth_workers)
    if count == 1:
        return ArraySource(
            arrays[0].images,
            images.y,
            images.classes,
            images.encoded.where,
            images.class_names,
            images.notes,
        )
    return PackedSource(
        tuple(arrays), images.y, images.classes, shape, images.class_names, images.notes
    )


@dataclass(frozen=True, eq=False)
class PackedSource(LabelledImages):
    """A source over several array files, which all have the same length except the last."""

    arrays: tuple[CheckedArray, ...]
    y: np.ndarray  # integers (n,), each in 0..classes-1
    classes: int
    shape: tuple[int, int, int]
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # for the user

    def __len__(self) -> int:
        return len(self.y)

    def labels(self) -> np.ndarray:
        return self.y

    def read(self, indices: np.ndarray) -> Batch:
        """Reads the images. Raises UserError if an image was altered after it was written."""
        check_indices(indices, len(self))
        x = np.empty((len(indices), *self.shape), np.uint8)
        shards, rows = np.divmod(indices, len(self.arrays[0]))
        for shard in np.unique(shards).tolist():
            of_shard = np.flatnonzero(shards == shard)
            x[of_shard] = self.arrays[shard].read(rows[of_shard])
        return {"x": x, "y": read_labels(self.y, indices)}


@dataclass(frozen=True)
class _Shard:
    """One array file; its images begin at index `start`."""

    path: Path
    start: int
    shape: tuple[int, ...]  # (rows, H, W, C)
    # the only file: mean and deviation read all of it at the start, so it is checked then, too
    is_only: bool

    def load(self) -> CheckedArray | None:
        array = load_checked(self.path, self.shape)
        return None if array is None or (self.is_only and not array.is_sound()) else array


def _load_or_decode(
    images: ImageSource, shards: list[_Shard], folder: Path, worth_workers: int | None
) -> list[CheckedArray]:
    arrays = _load(shards)
    if len(arrays) < len(shards):
        try:
            with locked(folder, f"decodes {images.encoded.where}"):
                missing = [shard for shard in shards if shard.load() is None]
                if missing:
                    with _readers(images, missing, worth_workers) as readers:
                        _decode(readers, missing, folder)
        except OSError as error:
            size = sum(math.prod(shard.shape) for shard in shards)
            fix = f"data.cache=DIR, with {size / 1e6:.0f} MB of free space"
            raise UserError(f"cannot pack the images: {error}", str(folder), fix) from error
        arrays = _load(shards)
    assert len(arrays) == len(shards), folder
    return arrays


@contextmanager
def _readers(
    images: ImageSource, missing: list[_Shard], worth_workers: int | None
) -> Iterator[list[ImageSource]]:
    """Returns a copy of the source for each thread that decodes, or that waits for worker processes
    and writes.

    Small images take the interpreter lock too often for two threads, so one thread decodes them and
    the others wait for processes. With large images all threads wait, for as many processes as
    cores. That is 1.11 times as fast as threads that decode, and 1.03 times as fast as one thread
    that decodes (docs/performance.md).
    """
    # not on macOS
    cores = _cores()
    can_start_workers = hasattr(os, "memfd_create")
    are_small = images.is_small(missing[0].start)
    if worth_workers is None:
        worth_workers = _WORTH_WORKERS if are_small else _WORTH_WORKERS_OF_LARGE
    if (
        cores == 1
        or not can_start_workers
        or sum(shard.shape[0] for shard in missing) < worth_workers
    ):
        yield [images] * (1 if are_small else cores)
    else:
        workers = WorkerPool(images.reader, cores - are_small, "packing")
        waiting = replace(images, workers=workers)
        try:
            yield [images, *[waiting] * (cores - 1)] if are_small else [waiting] * cores
        finally:
            workers.close()


def _cores() -> int:
    """Returns the number of cores that packing may use."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, _MOST_THREADS)


def _load(shards: list[_Shard]) -> list[CheckedArray]:
    """Loads the arrays of the files that are complete."""
    return [array for shard in shards if (array := shard.load()) is not None]


def _decode(readers: list[ImageSource], missing: list[_Shard], folder: Path) -> None:
    """Writes every missing file, one after the other, on a thread for each reader; prints progress
    every 2 s."""
    images = readers[0]
    for shard in missing:
        if shard.path.exists():
            print(
                f"the cached array {shard.path} is damaged: decoding again",
                file=sys.stderr,
                flush=True,
            )
    if shutil.disk_usage(folder).free < sum(math.prod(shard.shape) for shard in missing):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    total = sum(shard.shape[0] for shard in missing)
    began_s = perf_counter()

    def show_progress(before: int, in_shard: int, rest: str = "") -> None:
        done = before + in_shard
        rate = f"{done / (perf_counter() - began_s):.0f} images/s"
        print(
            f"decoded {images.encoded.where}: {done} / {total} images, {rate}{rest}",
            file=sys.stderr,
            flush=True,
        )

    done = 0
    for shard in missing:
        with write_npy(shard.path, "|u1", shard.shape) as out:
            write_checksums(shard.path, _fill(readers, shard, out, partial(show_progress, done)))
        done += shard.shape[0]
    present = f", {len(images) - total} more were already there" if total < len(images) else ""
    show_progress(
        total, 0, f"{present}, written to {missing[0].path if len(missing) == 1 else folder}"
    )


def _fill(
    readers: list[ImageSource], shard: _Shard, out: IO[bytes], show_progress: Callable[[int], None]
) -> np.ndarray:
    """Decodes the images of a shard and writes each at its place in the file; returns the checksums
    of its blocks."""
    done = [0] * len(readers)
    stop = Event()
    offset = out.tell()
    stride = math.prod(shard.shape[1:])
    block = min(max(1, _BLOCK_BYTES // stride), MOST_ROWS)
    checked_rows = rows_of_block(shard.shape)
    if (
        readers[0].workers is not readers[-1].workers
    ):  # small images: one thread decodes beside the processes
        block *= _BLOCKS_FOR_WORKERS
    starts = iter(range(0, shard.shape[0], block))  # starts of blocks that no thread has taken yet
    sums = np.zeros(-(-shard.shape[0] // checked_rows), np.uint64)

    def work(thread: int) -> None:
        for start in starts:
            if stop.is_set():
                return
            rows = np.arange(start, min(start + block, shard.shape[0]))
            pixels = readers[thread].read(shard.start + rows)["x"]
            if os.pwrite(out.fileno(), pixels, offset + start * stride) != len(rows) * stride:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            checks = checksums(
                pixels, checked_rows
            )  # the checksum covers the decoded bytes, not the bytes on the disk
            sums[start // checked_rows : start // checked_rows + len(checks)] = checks
            done[thread] += len(rows)

    def flush() -> None:
        """Starts writing to disk while images are still being decoded."""
        while not stop.wait(_FLUSH_S):
            os.fsync(out.fileno())

    with ThreadPoolExecutor(len(readers) + 1) as pool:
        flushing = pool.submit(flush)
        futures = [pool.submit(work, thread) for thread in range(len(readers))]
        try:
            while not _wait_all(futures, _PROGRESS_S):
                show_progress(sum(done))
        finally:
            stop.set()
        flushing.result()  # the system reports a disk error only once
    return sums


def _wait_all(futures: list[Future[None]], timeout_s: float) -> bool:
    """Waits for at most `timeout_s` and returns whether all are done. Raises the exception of a
    future that failed."""
    finished, unfinished = wait(futures, timeout_s, FIRST_EXCEPTION)
    for future in finished:
        future.result()
    return not unfinished
