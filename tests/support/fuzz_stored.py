"""Damaged files of each format, drawn from a seed: each is read, or is a UserError.

python tests/support/fuzz_stored.py FOLDER SEED FILES prints what else happened, and fails then.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hvdtrain.config import plugins
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.extras.science.data.datasets import csv, npz, parquet

Build = Callable[[Path], Source]


def sound(folder: Path, random: np.random.Generator) -> list[tuple[Path, Build]]:
    """A sound file of each format whose library is here, and what opens one."""
    x = random.normal(size=(60, 4, 3)).astype("f4")
    y = random.integers(0, 3, 60)
    np.savez(folder / "a.npz", x=x, y=y)
    np.savez_compressed(folder / "b.npz", x=x, y=y)
    lines = [f"{a},{b},{c}" for a, b, c in zip(x[:, 0, 0], x[:, 0, 1], y, strict=True)]
    (folder / "a.csv").write_text("\n".join(["a,b,y", *lines]))
    found: list[tuple[Path, Build]] = [
        (folder / name, lambda path: npz.build("npz", path, "train")) for name in ("a.npz", "b.npz")
    ]
    found.append((folder / "a.csv", lambda path: csv.build("csv", path, "train")))
    if importlib.util.find_spec("h5py"):
        import h5py

        with h5py.File(folder / "a.h5", "w") as file:
            file.create_dataset("x", data=x, chunks=(8, 4, 2), compression="gzip", shuffle=True)
            file["y"] = y
        build = plugins.load("data/datasets", "hdf5", "").build
        found.append((folder / "a.h5", lambda path: build("hdf5", path, "train")))
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(
            pyarrow.table({"a": x[:, 0, 0], "y": y}), folder / "a.parquet", row_group_size=20
        )
        found.append((folder / "a.parquet", lambda path: parquet.build("parquet", path, "train")))
    return found


def damaged(raw: bytes, random: np.random.Generator) -> bytes:
    """One to three bytes changed, most near the beginning or the end; in one of three files the
    rest cut off."""
    content = bytearray(raw[: random.integers(0, len(raw))] if random.random() < 0.3 else raw)
    for _ in range(random.integers(1, 4) if content else 0):
        near = (
            random.integers(0, 600)
            if random.random() < 0.5
            else len(content) - 1 - random.integers(0, 400)
        )
        place = (
            random.integers(0, len(content))
            if random.random() < 0.5
            else np.clip(near, 0, len(content) - 1)
        )
        content[place] = random.integers(0, 256)
    return bytes(content)


def main() -> int:
    folder = Path(sys.argv[1])
    random = np.random.default_rng(int(sys.argv[2]))
    outcomes = {"read": 0, "UserError": 0}
    for path, build in sound(folder, random):
        raw = path.read_bytes()
        for number in range(int(sys.argv[3])):
            file = folder / f"damaged-{number}{path.suffix}"
            file.write_bytes(damaged(raw, random))
            try:
                source = build(file)
                source.read(np.arange(len(source))[:500])
                outcomes["read"] += 1
            except UserError:
                outcomes["UserError"] += 1
            except Exception:
                traceback.print_exc()
                return 1
            file.unlink()
    print(outcomes)
    return 0 if min(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
