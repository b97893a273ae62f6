"""Images/s of an image folder: packing (the first epoch), reading packed, decoding at each read, tar archives, and torchvision's loader.

python benchmarks/folder.py --root DIR [--images 10000] [--rounds 7] [--json FILE]

DIR holds train/CLASS/*.jpg. Every way reads the same images once in each round, in batches of 128 at random, and the order turns. The
first round warms up. torchvision: ImageFolder with PILToTensor behind a DataLoader, 0 and 2 workers; ratios are to 2 workers.
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


def some(root: Path, home: Path, count: int) -> Path:
    """A folder of links to `count` images, as many of each class, and the same images as tar archives."""
    classes = sorted(path for path in (root / "train").iterdir() if path.is_dir())
    chosen = [path for files in zip(*(sorted(c.iterdir()) for c in classes), strict=False) for path in files][:count]
    for path in chosen:
        place = home / "folder" / "train" / path.parent.name / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path.resolve())
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


def epoch(source: Any, threads: int, turn: int) -> int:
    """Images read."""
    order = np.random.default_rng(turn).permutation(len(source))
    parts = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    with ThreadPoolExecutor(threads) as pool:
        return sum(len(batch["y"]) for batch in (map(source.read, parts) if threads == 1 else pool.map(source.read, parts)))


def anew(build: Callable[..., Any], name: str, root: Path, cache: Path) -> int:
    """A source whose cache is empty."""
    shutil.rmtree(cache, ignore_errors=True)
    with contextlib.redirect_stderr(io.StringIO()):
        return len(build(name, root, "train", cache=cache))


def ways(home: Path) -> dict[str, Callable[[int], int]]:
    """Each reads all images once."""
    images, archives = home / "folder", home / "tar"
    with contextlib.redirect_stderr(io.StringIO()):
        whole, loose = (folder.build("folder", images, "train", cache=home / "whole", packed=packed) for packed in (True, False))
        pixels = len(whole) * int(np.prod(whole.shape))
        shards = pack(loose, home / "shards", -(-pixels // SHARDS))  # type: ignore[arg-type]
        tars = webdataset.build("webdataset", archives, "train", cache=home / "index")
    vision = import_torchvision()
    data = vision.datasets.ImageFolder(images / "train", transform=vision.transforms.PILToTensor())
    loaders = {n: torch.utils.data.DataLoader(data, BATCH, shuffle=True, num_workers=n, persistent_workers=n > 0) for n in (0, 2)}
    return {
        "packing": lambda turn: anew(folder.build, "folder", images, home / "anew"),
        "indexing archives": lambda turn: anew(webdataset.build, "webdataset", archives, home / "index anew"),
        "packed, one file": lambda turn: epoch(whole, 1, turn),
        f"packed, {SHARDS} files": lambda turn: epoch(shards, 1, turn),
        "packed=false, 1 thread": lambda turn: epoch(loose, 1, turn),
        "packed=false, 2 threads": lambda turn: epoch(loose, 2, turn),
        "webdataset, 1 thread": lambda turn: epoch(tars, 1, turn),
        "webdataset, 2 threads": lambda turn: epoch(tars, 2, turn),
        "torchvision, 0 workers": lambda turn: sum(len(y) for _, y in loaders[0]),
        BASE: lambda turn: sum(len(y) for _, y in loaders[2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        todo = ways(some(a.root, Path(home), a.images))
        rates: dict[str, list[float]] = {name: [] for name in todo}
        for turn in range(a.rounds + 1):
            names = itertools.islice(itertools.cycle(todo), turn, turn + len(todo))
            for name in names:
                began = time.perf_counter()
                count = todo[name](turn)
                if turn:
                    rates[name].append(count / (time.perf_counter() - began))
    for name, found in rates.items():
        ratios = [one / other for one, other in zip(found, rates[BASE], strict=True)]
        row = {
            "way": name,
            "images_per_s": statistics.median(found),
            "range": [min(found), max(found)],
            "n": len(found),
            "images": a.images,
        }
        row |= {"to torchvision": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name:24} {statistics.median(found):11,.0f} images/s  x {statistics.median(ratios):7.2f} ({span})")
        if a.json:
            with a.json.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
