"""A folder of images for each class, decoded once into one array file."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import sys
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import NamedTuple

import numpy as np

from hvdtrain.config_text import short
from hvdtrain.configure import expand
from hvdtrain.data.fetch import alone, cache_root
from hvdtrain.data.picture import MODES, MOST_SIDE, SUFFIXES, bombs_refused, check_file, decode, extent
from hvdtrain.data.source import ArraySource, Source, Split
from hvdtrain.errors import UserError

_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "test")}
_PROGRESS_S = 2.0


def build(name: str, root: Path | None, split: Split, *, size: int | None = None, channels: int = 3, cache: Path | None = None) -> Source:
    """Images in <root>/<split>/<class>/*.{jpg,jpeg,png,bmp,webp}; `split` is train, and val, validation or test (the first that is there).

    Class numbers follow the sorted names of train's folders. The first run decodes every image once and keeps the pixels as one array file;
    a change of any file's name, size or time makes a new one.

    size: height and width that images are brought to, centre square of the image (pixels; none: they are all alike already)
    channels: 3 for colour, 1 for grey
    cache: folder of the array files (none: $XDG_CACHE_HOME/hvdtrain/folders, or ~/.cache/hvdtrain/folders)
    """
    if root is None:
        raise UserError("an image folder needs its place", "data.root", "data.root=DIR, with images in DIR/train/<class>/")
    if channels not in MODES or (size is not None and not 1 <= size <= MOST_SIDE):
        what = f"images of size {size} with {channels} channels are impossible"
        raise UserError(what, "data.size, data.channels", f"data.channels is 1 or 3, data.size is 1 to {MOST_SIDE}")
    classes, job = _plan(expand(root, "data.root"), split, size, channels)
    x = _pixels(job, (expand(cache, "data.cache") if cache else cache_root() / "folders") / job.key)
    y = np.repeat(np.arange(len(classes)), [len(files) for files in classes.values()]).astype(np.int64)
    return ArraySource(x, y, len(classes), str(job.folder))


class _Job(NamedTuple):
    """One split to decode."""

    folder: Path
    files: list[Path]  # by class, then by name
    first: Path  # train's first image: without a size, the extent of all
    size: int | None
    channels: int
    key: str  # of the cached array


def _plan(root: Path, split: Split, size: int | None, channels: int) -> tuple[dict[str, list[Path]], _Job]:
    try:
        train = _classes(_split_folder(root, "train"))
        folder = _split_folder(root, split)
        classes = train if split == "train" else _classes(folder)
        if classes.keys() != train.keys():
            odd = ", ".join(map(short, sorted(classes.keys() ^ train.keys())))
            raise UserError(f"only one of train and {folder.name} has class {odd}", str(folder), "the same class folders in both")
        key = _key(folder, classes, f"{size} {channels}")
    except OSError as error:
        raise UserError(f"cannot list the images: {error}", str(root), "mend or remove what is named") from error
    files = [file for members in classes.values() for file in members]
    return classes, _Job(folder, files, next(iter(train.values()))[0], size, channels, key)


def _split_folder(root: Path, split: Split) -> Path:
    for folder in _FOLDERS[split]:
        if (root / folder).is_dir():
            return root / folder
    raise UserError(f"no folder {' or '.join(_FOLDERS[split])}", str(root), f"data.root=DIR, with images in DIR/{split}/<class>/")


def _classes(folder: Path) -> dict[str, list[Path]]:
    """Sorted image files of each class, classes in sorted order; hidden names are passed over."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    classes = {name: _images(folder / name) for name in names}
    empty = [name for name, files in classes.items() if not files]
    if empty or not classes:
        what = f"no images ({' '.join(SUFFIXES)}) in class {', '.join(map(short, empty))}" if empty else "no class folders"
        raise UserError(what, str(folder), "one folder for each class, the images directly in it")
    return classes


def _images(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(os.listdir(folder)) if name.lower().endswith(SUFFIXES) and not name.startswith(".")]


def _key(folder: Path, classes: dict[str, list[Path]], options: str) -> str:
    """Changes with any file's name, size or time, with each class's first image (archives may set all times alike), with the options."""
    hashed = hashlib.blake2b(options.encode(), digest_size=12)
    for files in classes.values():
        for file in files:
            stat = check_file(file)
            if file is files[0]:
                hashed.update(file.read_bytes())
            hashed.update(f"{file.relative_to(folder)}\0{stat.st_size} {stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return hashed.hexdigest()


def _pixels(job: _Job, home: Path) -> np.ndarray:
    """uint8 (n, H, W, C), memory-mapped from `home`; whoever comes first decodes, the other processes of the machine wait."""
    height, width = (job.size, job.size) if job.size else extent(job.first)
    shape = (len(job.files), height, width, job.channels)
    target = home / "images.npy"
    x = _cached(target, shape)
    if x is not None:
        return x
    try:
        with alone(home, f"it decodes {job.folder}"):
            x = _cached(target, shape)
            if x is None:
                if target.exists():
                    print(f"the cached array {target} is damaged: decoding again", file=sys.stderr, flush=True)
                _decode(job, target, shape)
                x = _cached(target, shape)
    except OSError as error:
        fix = f"data.cache=DIR, with room for {math.prod(shape) / 1e6:.0f} MB"
        raise UserError(f"cannot keep the decoded images: {error}", str(home), fix) from error
    assert x is not None, target
    return x


def _cached(target: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The array in the file, or None where the file is absent, is no such array, or has another length. Its pixels are not checked."""
    if not target.is_file():
        return None
    try:
        x = np.lib.format.open_memmap(target, mode="r")
    except Exception:  # numpy raises OSError, ValueError, EOFError, tokenize.TokenError and more of a damaged header
        return None
    sound = x.dtype == np.uint8 and x.shape == shape and x.flags.c_contiguous and target.stat().st_size == x.offset + x.nbytes
    return np.asarray(x) if sound else None


def _decode(job: _Job, target: Path, shape: tuple[int, ...]) -> None:
    part = target.with_suffix(".part")
    begun = perf_counter()
    if shutil.disk_usage(target.parent).free < math.prod(shape):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    part.unlink(missing_ok=True)  # left by a process that was killed
    with part.open("xb") as out:  # never through a link
        np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})
        out.flush()
        _fill(job, out.fileno(), out.tell(), shape)
        os.fsync(out.fileno())
    os.replace(part, target)
    _say(job, len(job.files), perf_counter() - begun, f", kept in {target}")


def _fill(job: _Job, out: int, offset: int, shape: tuple[int, ...]) -> None:
    """Decode every image into its place in the file, on all cores that this process may use, with a line every 2 s."""
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 16)
    done, stop, begun = [0] * workers, Event(), perf_counter()
    stride = math.prod(shape[1:])

    def work(worker: int) -> None:
        for place in range(worker, len(job.files), workers):
            if stop.is_set():
                return
            pixels = decode(job.files[place], job.first, shape[1:], job.size is not None)
            if os.pwrite(out, pixels, offset + place * stride) != stride:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done[worker] += 1

    with bombs_refused(), ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, worker) for worker in range(workers)]
        try:
            while not _ended(futures):
                _say(job, sum(done), perf_counter() - begun)
        finally:
            stop.set()


def _ended(futures: list[Future[None]]) -> bool:
    """Whether all are done, after 2 s at most; raises what one of them raised."""
    finished, unfinished = wait(futures, _PROGRESS_S, FIRST_EXCEPTION)
    for future in finished:
        future.result()
    return not unfinished


def _say(job: _Job, done: int, elapsed_s: float, rest: str = "") -> None:
    print(f"decoded {job.folder}: {done} / {len(job.files)} images, {done / elapsed_s:.0f} images/s{rest}", file=sys.stderr, flush=True)
