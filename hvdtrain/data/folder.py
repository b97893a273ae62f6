"""A folder of images for each class, decoded once into one array file."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvdtrain.data.fetch import alone, cache_root
from hvdtrain.data.source import ArraySource, Source, Split
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # by content: PIL knows formats that start other programs
_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "test")}
_MODES = {1: "L", 3: "RGB"}
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
    if channels not in _MODES or (size is not None and size < 1):
        what = f"images of size {size} with {channels} channels are impossible"
        raise UserError(what, "data.size, data.channels", "data.channels is 1 or 3, data.size is 1 or more")
    classes, job = _plan(root.expanduser(), split, size, channels)
    x = _pixels(job, (cache.expanduser() if cache else cache_root() / "folders") / job.key)
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
            odd = ", ".join(sorted(classes.keys() ^ train.keys()))
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
        what = f"no images ({' '.join(_SUFFIXES)}) in class {', '.join(empty)}" if empty else "no class folders"
        raise UserError(what, str(folder), "one folder for each class, the images directly in it")
    return classes


def _images(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(os.listdir(folder)) if name.lower().endswith(_SUFFIXES) and not name.startswith(".")]


def _key(folder: Path, classes: dict[str, list[Path]], options: str) -> str:
    """Changes with any file's name, size or time, with each class's first image (archives may set all times alike), with the options."""
    hashed = hashlib.blake2b(options.encode(), digest_size=12)
    for files in classes.values():
        hashed.update(files[0].read_bytes())
        for file in files:
            stat = file.stat()
            hashed.update(f"{file.relative_to(folder)}\0{stat.st_size} {stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return hashed.hexdigest()


def _pixels(job: _Job, home: Path) -> np.ndarray:
    """uint8 (n, H, W, C), memory-mapped from `home`; whoever comes first decodes, the other processes of the machine wait."""
    height, width = (job.size, job.size) if job.size else _extent(job.first)
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
    try:
        x = np.lib.format.open_memmap(target, mode="r")
    except (OSError, ValueError, EOFError):
        return None
    sound = x.dtype == np.uint8 and x.shape == shape and x.flags.c_contiguous and target.stat().st_size == x.offset + x.nbytes
    return np.asarray(x) if sound else None


def _decode(job: _Job, target: Path, shape: tuple[int, ...]) -> None:
    part = target.with_suffix(".part")
    begun = perf_counter()
    with part.open("wb") as out:
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
            pixels = _image(job.files[place], job, shape[1:3])
            if os.pwrite(out, pixels, offset + place * stride) != stride:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done[worker] += 1

    with _bombs_refused(), ThreadPoolExecutor(workers) as pool:
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


def _image(file: Path, job: _Job, extent: tuple[int, ...]) -> bytes:
    """Pixels (H, W, C) of one image, row by row."""
    from PIL.Image import Resampling

    with _opened(file) as image:
        if image.mode.startswith("I"):
            raise UserError(f"the image has more than 8 bits a channel (mode {image.mode})", str(file), "convert it")
        if not job.size and (image.height, image.width) != extent:
            raise UserError(
                f"the images differ in size: {extent[1]} x {extent[0]} and {image.width} x {image.height} pixels",
                f"{job.first} and {file}",
                f"data.size={min(extent)} brings all to a centre square of that size",
            )
        picture = image.convert(_MODES[job.channels])
        if job.size:  # the shorter side to the size and a centre crop, in one
            side = min(picture.size)
            left, top = (picture.width - side) / 2, (picture.height - side) / 2
            picture = picture.resize((job.size, job.size), Resampling.BILINEAR, (left, top, left + side, top + side))
        return picture.tobytes()


def _extent(file: Path) -> tuple[int, int]:
    with _bombs_refused(), _opened(file) as image:
        return image.height, image.width


@contextmanager
def _bombs_refused() -> Iterator[None]:
    """PIL only warns of an image between one and two times its limit of pixels."""
    from PIL.Image import DecompressionBombWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", DecompressionBombWarning)
        yield


@contextmanager
def _opened(file: Path) -> Iterator[Image]:
    """A PIL image; whatever a broken file makes PIL raise is a UserError that names the file."""
    import PIL.Image

    try:
        with PIL.Image.open(file, formats=_FORMATS) as image:
            yield image
    except UserError:
        raise
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise UserError(f"the image is too large to be decoded safely: {error}", str(file), "make it smaller, or remove it") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise UserError(f"the image cannot be read: {type(error).__name__}: {error}", str(file), "mend or remove the file") from error
