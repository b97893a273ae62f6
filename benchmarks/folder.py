"""Images/s of an image folder: packing it (in the first epoch), packed, decoded at each read, in tar archives, and by torchvision.

python benchmarks/folder.py --root DIR [--images 10000] [--rounds 7] [--json FILE]

DIR holds train/CLASS/*.jpg. In each round every method reads the same images once, in random batches of 128; each round starts with
another method, and the first round warms up. torchvision: ImageFolder with PILToTensor behind a DataLoader, 0 and 2 workers; ratios
are to 2 workers.
"""

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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.data.datasets import folder, webdataset
from hvdtrain.data.images.pack import pack

BATCH, SHARDS, ARCHIVES = 128, 8, 10
BASE = "torchvision, 2 workers"


def prepare_images(root: Path, home: Path, count: int) -> Path:
    """A folder of links to `count` images, equally many of each class, and the same images as tar archives."""
    classes = sorted(path for path in (root / "train").iterdir() if path.is_dir())
    chosen = [path for files in zip(*(sorted(c.iterdir()) for c in classes), strict=False) for path in files][:count]
    for path in chosen:
        link = home / "folder" / "train" / path.parent.name / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())
    (home / "tar" / "train").mkdir(parents=True)
    labels = {path.name: str(i).encode() for i, path in enumerate(classes)}
    for i, archive in enumerate(np.array_split(np.random.default_rng(0).permutation(len(chosen)), ARCHIVES)):
        with tarfile.open(home / "tar" / "train" / f"{i:06}.tar", "w") as tar:
            for k in archive:
                for suffix, content in (("cls", labels[chosen[k].parent.name]), ("jpg", chosen[k].read_bytes())):
                    member = tarfile.TarInfo(f"{k:06}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return home


def read_epoch(source: Any, threads: int, round_number: int) -> int:
    """Reads all images in a random order, and returns their number."""
    order = np.random.default_rng(round_number).permutation(len(source))
    indices = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    if threads == 1:
        return sum(len(source.read(rows)["y"]) for rows in indices)
    with ThreadPoolExecutor(threads) as pool:
        return sum(len(batch["y"]) for batch in pool.map(source.read, indices))


def build_uncached(build: Callable[..., Any], name: str, root: Path, cache: Path) -> int:
    """Builds a source whose cache is empty, and returns the number of its images."""
    shutil.rmtree(cache, ignore_errors=True)
    with contextlib.redirect_stderr(io.StringIO()):
        return len(build(name, root, "train", cache=cache))


def methods(home: Path) -> dict[str, Callable[[int], int]]:
    """name -> function of the round's number that reads all images once and returns how many there were."""
    images, archives = home / "folder", home / "tar"
    with contextlib.redirect_stderr(io.StringIO()):
        packed, decoded = (folder.build("folder", images, "train", cache=home / "packed", packed=packed) for packed in (True, False))
        pixels = len(packed) * int(np.prod(packed.shape))
        shards = pack(decoded, home / "shards", -(-pixels // SHARDS))  # type: ignore[arg-type]
        tars = webdataset.build("webdataset", archives, "train", cache=home / "index")
    vision = import_torchvision()
    data = vision.datasets.ImageFolder(images / "train", transform=vision.transforms.PILToTensor())
    loaders = {n: torch.utils.data.DataLoader(data, BATCH, shuffle=True, num_workers=n, persistent_workers=n > 0) for n in (0, 2)}
    return {
        "packing": lambda number: build_uncached(folder.build, "folder", images, home / "uncached"),
        "indexing archives": lambda number: build_uncached(webdataset.build, "webdataset", archives, home / "uncached index"),
        "packed, one file": lambda number: read_epoch(packed, 1, number),
        f"packed, {SHARDS} files": lambda number: read_epoch(shards, 1, number),
        "packed=false, 1 thread": lambda number: read_epoch(decoded, 1, number),
        "packed=false, 2 threads": lambda number: read_epoch(decoded, 2, number),
        "webdataset, 1 thread": lambda number: read_epoch(tars, 1, number),
        "webdataset, 2 threads": lambda number: read_epoch(tars, 2, number),
        "torchvision, 0 workers": lambda number: sum(len(y) for _, y in loaders[0]),
        BASE: lambda number: sum(len(y) for _, y in loaders[2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        readers = methods(prepare_images(options.root, Path(home), options.images))
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
        }
        row |= {"to torchvision": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name:24} {statistics.median(found):11,.0f} images/s  x {statistics.median(ratios):7.2f} ({span})")
        if options.json:
            with options.json.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
