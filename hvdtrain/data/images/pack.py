"""Decoded images kept in array files of bounded size: each is whole or not there, and only what is missing is decoded."""

from __future__ import annotations

import errno
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from hvdtrain.data.files.download import alone
from hvdtrain.data.images.image_source import Streamed, check_range, sampled_stats
from hvdtrain.data.source import ArraySource, Source
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_SHARD_BYTES = 2**30  # of pixels: so much work, at most, is lost when packing is interrupted
_PROGRESS_S = 2.0
_BLOCK_BYTES, _BLOCK_IMAGES = 2**22, 64  # decoded and written at once by a thread, at most


def pack(images: Streamed, home: Path, shard_bytes: int = _SHARD_BYTES) -> Source:
    """The same images out of array files in `home`, memory-mapped; whoever comes first decodes, the other processes of the machine wait.

    One file, which makes an ArraySource, if they take no more than `shard_bytes`.
    """
    shape = images.shape
    rows = max(1, shard_bytes // math.prod(shape))
    count = -(-len(images) // rows)
    names = ["images.npy"] if count == 1 else [f"images-{number:05}-of-{count:05}.npy" for number in range(count)]
    shards = [_Shard(home / name, number * rows, (min(rows, len(images) - number * rows), *shape)) for number, name in enumerate(names)]
    found = _arrays(images, shards, home)
    if count == 1:
        return ArraySource(found[0], images.y, images.classes, images.encoded.where)
    return Packed(tuple(found), images.y, images.classes, shape)


@dataclass(frozen=True, eq=False)
class Packed:
    """A source over several arrays, all but the last of one length."""

    arrays: tuple[np.ndarray, ...]  # uint8 (rows, H, W, C) each
    y: np.ndarray  # int64 (n,), each in 0..classes-1
    classes: int
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return len(self.y)

    def read(self, indices: np.ndarray) -> Batch:
        check_range(indices, len(self))
        x = np.empty((len(indices), *self.shape), np.uint8)
        shards, rows = np.divmod(indices, len(self.arrays[0]))
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            x[places] = self.arrays[shard][rows[places]]
        return {"x": x, "y": self.y[indices]}

    def stats(self) -> tuple[np.ndarray, np.ndarray]:
        """Of at most 2,000 images, the same as if they were streamed: see sampled_stats(). Reading all would take 5 s for each GiB."""
        return sampled_stats(self)


@dataclass(frozen=True)
class _Shard:
    """One array file, of the images from `start` on."""

    path: Path
    start: int
    shape: tuple[int, ...]  # (rows, H, W, C)

    def load(self) -> np.ndarray | None:
        return load_array(self.path, np.dtype(np.uint8), self.shape)


def _arrays(images: Streamed, shards: list[_Shard], home: Path) -> list[np.ndarray]:
    found = {shard.path: x for shard in shards if (x := shard.load()) is not None}
    if len(found) < len(shards):
        size = sum(math.prod(shard.shape) for shard in shards)
        try:
            with alone(home, f"it decodes {images.encoded.where}"):
                missing = [shard for shard in shards if shard.load() is None]
                if missing:
                    _decode(images, missing, home)
        except OSError as error:
            fix = f"data.cache=DIR, with room for {size / 1e6:.0f} MB"
            raise UserError(f"cannot keep the decoded images: {error}", str(home), fix) from error
        found = {shard.path: x for shard in shards if (x := shard.load()) is not None}
    assert len(found) == len(shards), home
    return list(found.values())


def load_array(path: Path, dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> np.ndarray | None:
    """The array in the file, memory-mapped, or None where the file is absent, is no such array, or has another length than it tells.

    None in `shape` is any length. What the array holds is not checked.
    """
    if not path.is_file():
        return None
    try:
        x = np.lib.format.open_memmap(path, mode="r")
    except Exception:  # numpy raises OSError, ValueError, EOFError, tokenize.TokenError and more of a damaged header
        return None
    alike = len(x.shape) == len(shape) and all(want in (None, have) for have, want in zip(x.shape, shape, strict=True))
    sound = x.dtype == dtype and alike and x.flags.c_contiguous and path.stat().st_size == x.offset + x.nbytes
    return np.asarray(x) if sound else None


@contextmanager
def array_file(path: Path, dtype: str, shape: tuple[int, ...]) -> Iterator[IO[bytes]]:
    """A file to be filled with an array's bytes, behind its header: it has its name once it is whole and on the disk."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)  # left by a process that was killed
    with part.open("xb") as out:  # never through a link
        np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
        out.flush()
        yield out
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, path)


def _decode(images: Streamed, missing: list[_Shard], home: Path) -> None:
    """Every missing file, one after the other, on all cores that this process may use, with a line every 2 s."""
    for shard in missing:
        if shard.path.exists():
            print(f"the cached array {shard.path} is damaged: decoding again", file=sys.stderr, flush=True)
    if shutil.disk_usage(home).free < sum(math.prod(shard.shape) for shard in missing):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    total, before, begun = sum(shard.shape[0] for shard in missing), 0, perf_counter()

    def say(before: int, shard_done: int, rest: str = "") -> None:
        done = before + shard_done
        rate = f"{done / (perf_counter() - begun):.0f} images/s"
        print(f"decoded {images.encoded.where}: {done} / {total} images, {rate}{rest}", file=sys.stderr, flush=True)

    for shard in missing:
        with array_file(shard.path, "|u1", shard.shape) as out:
            _fill(images, shard, out, partial(say, before))
        before += shard.shape[0]
    there = f", {len(images) - total} more were there" if total < len(images) else ""
    say(total, 0, f"{there}, kept in {missing[0].path if len(missing) == 1 else home}")


def _fill(images: Streamed, shard: _Shard, out: IO[bytes], say: Callable[[int], None]) -> None:
    """Decode every image into its place in the file."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = 1 if images.is_small(shard.start) else min(cores, 16)
    done, stop = [0] * workers, Event()
    offset, stride = out.tell(), math.prod(shard.shape[1:])
    block = min(max(1, _BLOCK_BYTES // stride), _BLOCK_IMAGES)

    def work(worker: int) -> None:
        for start in range(worker * block, shard.shape[0], workers * block):
            if stop.is_set():
                return
            rows = np.arange(start, min(start + block, shard.shape[0]))
            if os.pwrite(out.fileno(), images.read(shard.start + rows)["x"], offset + start * stride) != len(rows) * stride:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done[worker] += len(rows)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, worker) for worker in range(workers)]
        try:
            while not _ended(futures):
                say(sum(done))
        finally:
            stop.set()


def _ended(futures: list[Future[None]]) -> bool:
    """Whether all are done, after 2 s at most; raises what one of them raised."""
    finished, unfinished = wait(futures, _PROGRESS_S, FIRST_EXCEPTION)
    for future in finished:
        future.result()
    return not unfinished
