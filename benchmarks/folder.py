"""Images/s of an image folder: packing it (in the first epoch), packed, decoded at each read, in tar archives, and by torchvision.

python benchmarks/folder.py --root DIR [--images 10000] [--rounds 7] [--size 224] [--enlarge 500x400] [--crop 0.08]
    [--home DIR] [--json FILE]

DIR holds train/CLASS/*.jpg. In each round every method reads the same images once, in random batches of 128; each round starts with
another method, and the first round warms up. Packing reads them in order, and its time includes the
start of its worker processes. torchvision: ImageFolder with PILToTensor and a DataLoader with 0 and
2 persistent workers; with --size also Resize and CenterCrop of PIL images. Ratios are to 2 workers.
"on tensors": the same with transforms.v2 after PILToTensor. Its resizing uses vector instructions,
and its pixels differ by 1 of 255. torchvision's own JPEG decoder is not in PyPI's wheel for a CPU
build of torch. --enlarge resizes DIR's images to that size, adds noise, and stores JPEGs of quality
90. --crop S: random boxes of at least this share of the whole image, resized to --size, by
torchvision's RandomResizedCrop((S, 1)); nothing is packed then. --home keeps the images for a next
run.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch

from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.extras.image_files.data.datasets import folder
from hvdtrain.extras.image_files.decoded_files import pack
from hvdtrain.extras.image_files.image_source import ImageSource
from hvdtrain.extras.webdataset.data.datasets import webdataset

BATCH = 128
SHARDS = 8
ARCHIVES = 10
BASE = "torchvision, 2 workers"


def prepare_images(root: Path, home: Path, count: int, enlarge: tuple[int, int] | None) -> Path:
    """Creates a folder of `count` images, equally many of each class, and the same images as tar
    archives, unless they exist. Returns the folder."""
    if (home / "tar").exists():
        return home
    classes = sorted(path for path in (root / "train").iterdir() if path.is_dir())
    chosen = [
        path
        for files in zip(*(sorted(c.iterdir()) for c in classes), strict=False)
        for path in files
    ][:count]
    for path in chosen:
        link = home / "folder" / "train" / path.parent.name / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if enlarge is None:
            link.symlink_to(path.resolve())
        else:
            write_enlarged(path, link, enlarge)
    (home / "tar" / "train").mkdir(parents=True)
    labels = {path.name: str(i).encode() for i, path in enumerate(classes)}
    chosen = [home / "folder" / "train" / path.parent.name / path.name for path in chosen]
    for i, archive in enumerate(
        np.array_split(np.random.default_rng(0).permutation(len(chosen)), ARCHIVES)
    ):
        with tarfile.open(home / "tar" / "train" / f"{i:06}.tar", "w") as tar:
            for k in archive:
                for suffix, content in (
                    ("cls", labels[chosen[k].parent.name]),
                    ("jpg", chosen[k].read_bytes()),
                ):
                    member = tarfile.TarInfo(f"{k:06}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return home


def write_enlarged(path: Path, to: Path, size: tuple[int, int]) -> None:
    """A JPEG of `size`, width and height; noise gives it the bytes of a photograph."""
    pixels = np.asarray(
        PIL.Image.open(path).convert("RGB").resize(size, PIL.Image.Resampling.BICUBIC), np.float32
    )
    noise = np.random.default_rng(len(path.name)).normal(0, 6, pixels.shape)
    PIL.Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(to, "JPEG", quality=90)


def read_epoch(source: Any, threads: int, round_number: int) -> int:
    """Reads all images in a random order, and returns their number."""
    order = np.random.default_rng(round_number).permutation(len(source))
    indices = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]

    def read(rows: np.ndarray) -> Any:
        return source.read_in_epochs(rows, np.full(len(rows), round_number), 0)

    if threads == 1:
        return sum(len(read(rows)["y"]) for rows in indices)
    with ThreadPoolExecutor(threads) as pool:
        return sum(len(batch["y"]) for batch in pool.map(read, indices))


def build_uncached(
    build: Callable[..., Any], name: str, root: Path, cache: Path, size: int | None
) -> int:
    """Builds a source whose cache is empty, and returns the number of its images."""
    shutil.rmtree(cache, ignore_errors=True)
    with contextlib.redirect_stderr(io.StringIO()):
        return len(build(name, root, "train", cache=cache, size=size))


def vision_transforms(vision: Any, size: int | None, crop: float | None) -> list[Any]:
    """Returns the same transforms for PIL images, and for tensors with transforms.v2."""
    import_module("torchvision.transforms.v2")
    pil = vision.transforms
    tensors = vision.transforms.v2
    if crop is not None:
        resizing = [[kind.RandomResizedCrop(size, (crop, 1.0))] for kind in (pil, tensors)]
    else:
        resizing = [
            [] if size is None else [kind.Resize(size), kind.CenterCrop(size)]
            for kind in (pil, tensors)
        ]
    return [
        pil.Compose([*resizing[0], pil.PILToTensor()]),
        tensors.Compose([tensors.PILToTensor(), *resizing[1]]),
    ]


def methods(home: Path, size: int | None, crop: float | None) -> dict[str, Callable[[int], int]]:
    """name -> function of the round's number that reads all images once and returns how many there
    were."""
    images = home / "folder"
    archives = home / "tar"
    with contextlib.redirect_stderr(io.StringIO()):
        packed, decoded = (
            folder.build("folder", images, "train", cache=home / "packed", size=size, packed=packed)
            for packed in (True, False)
        )
        assert isinstance(decoded, ImageSource)
        pixels = len(packed) * int(np.prod(packed.shape))
        shards = pack(decoded, home / "shards", -(-pixels // SHARDS))
        tars = webdataset.build("webdataset", archives, "train", cache=home / "index", size=size)
    assert isinstance(tars, ImageSource)
    vision = import_torchvision()
    by_pil, by_tensors = (
        vision.datasets.ImageFolder(images / "train", transform=transform)
        for transform in vision_transforms(vision, size, crop)
    )
    if crop is not None:
        decoded = decoded.cropped(crop)
        tars = tars.cropped(crop)
    by_workers = decoded.read_by(2)
    tars_by_workers = tars.read_by(2)
    loaders = [
        torch.utils.data.DataLoader(
            data, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )
        for data, workers in ((by_pil, 0), (by_tensors, 2), (by_pil, 2))
    ]
    readers = {
        "packing": lambda number: build_uncached(
            folder.build, "folder", images, home / "uncached", size
        ),
        "packing archives": lambda number: build_uncached(
            partial(webdataset.build, packed=True), "webdataset", archives, home / "uncached", size
        ),
        "indexing archives": lambda number: build_uncached(
            webdataset.build, "webdataset", archives, home / "uncached index", size
        ),
        "packed, one file": lambda number: read_epoch(packed, 1, number),
        f"packed, {SHARDS} files": lambda number: read_epoch(shards, 1, number),
        "packed=false, 1 thread": lambda number: read_epoch(decoded, 1, number),
        "packed=false, 2 threads": lambda number: read_epoch(decoded, 2, number),
        "packed=false, 2 workers": lambda number: read_epoch(by_workers, 2, number),
        "webdataset, 1 thread": lambda number: read_epoch(tars, 1, number),
        "webdataset, 2 threads": lambda number: read_epoch(tars, 2, number),
        "webdataset, 2 workers": lambda number: read_epoch(tars_by_workers, 2, number),
        "torchvision, 0 workers": lambda number: sum(len(y) for _, y in loaders[0]),
        "torchvision on tensors, 2 workers": lambda number: sum(len(y) for _, y in loaders[1]),
        BASE: lambda number: sum(len(y) for _, y in loaders[2]),
    }
    return {
        name: read
        for name, read in readers.items()
        if crop is None or not name.startswith(("pack", "index")) or "=false" in name
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int)
    parser.add_argument(
        "--enlarge", type=lambda word: tuple(map(int, word.split("x"))), help="WIDTHxHEIGHT"
    )
    parser.add_argument("--crop", type=float, help="needs --size")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="methods whose names begin so, beside the one that ratios are to",
    )
    parser.add_argument(
        "--home",
        type=Path,
        help="keeps the images that are read there, for the same --images and --enlarge",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as unkept:
        home = options.home or Path(unkept)
        readers = methods(
            prepare_images(options.root, home, options.images, options.enlarge),
            options.size,
            options.crop,
        )
        readers = {
            name: read
            for name, read in readers.items()
            if name == BASE or name.startswith(tuple(options.only or [""]))
        }
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for number in range(options.rounds + 1):
            for name in itertools.islice(itertools.cycle(readers), number, number + len(readers)):
                began = time.perf_counter()
                count = readers[name](number)
                if number > 0:  # the first round warms up
                    rates[name].append(count / (time.perf_counter() - began))
    for name, found in rates.items():
        ratios = [rate / base for rate, base in zip(found, rates[BASE], strict=True)]
        row = {
            "method": name,
            "images_per_s": statistics.median(found),
            "range": [min(found), max(found)],
            "n": len(found),
            "images": options.images,
            "size": options.size,
            "enlarged": options.enlarge,
            "crop": options.crop,
        }
        row |= {
            "to torchvision": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
        }
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"{name:34} {statistics.median(found):11,.0f} images/s  x "
            f"{statistics.median(ratios):7.2f} ({span})"
        )
        if options.json:
            with options.json.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
