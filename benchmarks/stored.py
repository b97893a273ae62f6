"""Samples per second from one HDF5 file, as data.name=hdf5 reads it and as a torch Dataset with h5py in a DataLoader does, alternating.

python benchmarks/stored.py --rounds 5 --json benchmarks/stored.jsonl
mpirun -np 2 python benchmarks/stored.py --rounds 5 --ranks      chunks that ranks decode together, with and without blocks of their own

The file is made first: fields of 4 variables on a grid, smooth in space, with numbers to predict.
It does not fit into the cache of decoded chunks (data.cache_mb). Each method has a warm-up epoch.
Every method's samples of the first epoch are compared with the file's.
"""  # noqa: E501

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from hvdtrain.core.progress import Progress
from hvdtrain.data.array_files import array_files_in
from hvdtrain.data.sampler import BlockShuffle, BlocksOfRanks, Shuffle, positions_of_rank
from hvdtrain.data.upcoming import Upcoming
from hvdtrain.extras.science.data.datasets import hdf5

BATCH = 64
WORKERS = 2
CACHE_MB = 32
CHUNK = 16
BASE = "DataLoader, 2 workers"


def write(path: Path, samples: int) -> None:
    random = np.random.default_rng(0)
    waves = np.linspace(0, 2 * np.pi, 32, dtype="f4")
    with h5py.File(path, "w") as file:
        arrays = [
            file.create_dataset(
                "chunks",
                (samples, 4, 32, 32),
                "f4",
                chunks=(CHUNK, 4, 32, 32),
                compression="gzip",
                shuffle=True,
            ),
            file.create_dataset("plain", (samples, 4, 32, 32), "f4"),
        ]
        file["y"] = np.arange(samples, dtype="f4")
        for first in range(0, samples, 1024):
            count = min(1024, samples - first)
            phase = random.uniform(0, 6, (count, 4, 1, 1)).astype("f4")
            scale = random.uniform(0.5, 2, (count, 4, 1, 1)).astype("f4")
            field = np.sin(waves[:, None] * scale + phase) * np.cos(waves * scale - phase)
            field += random.normal(0, 0.01, field.shape).astype("f4").round(2)
            for array in arrays:
                array[first : first + count] = field


class H5Dataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Follows the documentation of h5py and torch: each worker opens the file."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.file = None
        with h5py.File(path) as file:
            self.samples = len(file["y"])

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        if self.file is None:
            self.file = h5py.File(self.path)
        return torch.from_numpy(self.file[self.name][index]), self.file["y"][index]


def by_loader(path: Path, name: str, workers: int) -> Callable[[int], Iterator[tuple[Any, Any]]]:
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(
        H5Dataset(path, name),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=bool(workers),
        drop_last=True,
    )
    return lambda epoch: iter(loader)


def by_source(
    path: Path, name: str, shuffle: BlockShuffle | None, processes: int = 0, told: bool = True
) -> Callable[[int], Iterator[tuple[Any, Any]]]:
    source = hdf5.build("hdf5", path, "train", fields={"x": name, "y": "y"}, cache_mb=CACHE_MB)
    source = source.read_by(processes) if processes else source
    pool = ThreadPoolExecutor(WORKERS)

    def samples_of(progress: Progress) -> np.ndarray:
        return positions_of_rank(
            progress.samples, BATCH, 0, 1, len(source), 0, shuffle=shuffle
        ).samples

    upcoming = Upcoming(source, samples_of, _following)

    def read(start: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = source.read(samples_of(Progress(len(source), 2**40, start // BATCH, start)))
        return torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])

    def batches(epoch: int) -> Iterator[tuple[Any, Any]]:
        starts = iter(range(epoch * len(source), (epoch + 1) * len(source) - BATCH + 1, BATCH))

        def submit(start: int) -> Future[tuple[torch.Tensor, torch.Tensor]]:
            if told:
                upcoming.reads(Progress(len(source), 2**40, start // BATCH, start))
            return pool.submit(read, start)

        pending = list(map(submit, itertools.islice(starts, 2 * WORKERS)))
        while pending:
            yield pending.pop(0).result()
            pending += map(submit, itertools.islice(starts, 1))

    return batches


def check(batches: Iterator[tuple[Any, Any]], path: Path, name: str) -> None:
    with h5py.File(path) as file:
        for x, y in itertools.islice(batches, 3):
            assert all(
                np.array_equal(file[name][int(number)], one)
                for one, number in zip(x.numpy(), y, strict=True)
            )
        for _ in batches:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", action="store_true")
    options = parser.parse_args()
    if options.ranks:
        of_ranks(options)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fields.h5"
        write(path, options.samples)
        for name in ("chunks", "plain"):
            methods = {
                BASE: by_loader(path, name, WORKERS),
                "DataLoader, no worker": by_loader(path, name, 0),
                "hdf5, 2 threads": by_source(path, name, None),
                "hdf5, 2 threads, not told": by_source(path, name, None, told=False),
                "hdf5, 2 processes": by_source(path, name, None, WORKERS),
                "hdf5, shuffle=blocks, 2 threads": by_source(
                    path, name, BlockShuffle(CHUNK, 16), told=False
                ),
            }
            rates: dict[str, list[float]] = {method: [] for method in methods}
            for batches in methods.values():
                check(batches(0), path, name)
            for number in range(1, options.rounds + 1):
                for method in itertools.islice(
                    itertools.cycle(methods), number, number + len(methods)
                ):
                    began = time.perf_counter()
                    count = sum(len(y) for _, y in methods[method](number))
                    rates[method].append(count / (time.perf_counter() - began))
            report(name, rates, options)


def of_ranks(options: argparse.Namespace) -> None:
    """Each rank reads its share of every step with one thread; the time of the slowest, and the
    chunks that all decode."""
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    path = Path(ranks.bcast(tempfile.mkdtemp() if ranks.rank == 0 else None)) / "fields.h5"
    if ranks.rank == 0:
        write(path, options.samples)
    ranks.Barrier()
    kinds: dict[str, Shuffle | None] = {
        "shares as they come": None,
        "own blocks": BlocksOfRanks(CHUNK),
        "blocks": BlockShuffle(CHUNK, 16),
    }
    for cache_mb in (CACHE_MB, CACHE_MB // 4):
        reads = {
            name: _reader(path, cache_mb, kind, ranks.rank, ranks.size)
            for name, kind in kinds.items()
        }
        found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in kinds}
        for number in range(options.rounds + 1):
            for name in itertools.islice(itertools.cycle(kinds), number, number + len(kinds)):
                ranks.Barrier()
                began = time.perf_counter()
                began_cpu = time.thread_time()
                decoded = reads[name](number)
                cpu = ranks.allreduce(time.thread_time() - began_cpu)
                found[name].append(
                    (options.samples / (time.perf_counter() - began), cpu, ranks.allreduce(decoded))
                )
        if ranks.rank == 0:
            for name, rounds in found.items():
                ratios = sorted(
                    one[0] / base[0]
                    for one, base in zip(rounds[1:], found["shares as they come"][1:], strict=True)
                )
                rate, cpu, chunks = (
                    statistics.median(row[column] for row in rounds[1:]) for column in range(3)
                )
                span = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                text = (
                    f"{rate:9,.0f} samples/s  x {span}, {cpu:.2f} s of the processor, "
                    f"{chunks:,.0f} chunks an epoch"
                )
                print(f"{ranks.size} ranks, {cache_mb:2} MB  {name:20} {text}")
    ranks.Barrier()
    if ranks.rank == 0:
        shutil.rmtree(path.parent)


def _reader(
    path: Path, cache_mb: int, shuffle: Shuffle | None, rank: int, size: int
) -> Callable[[int], int]:
    """Reads an epoch of a rank; gives the chunks that were decoded for it."""
    source = array_files_in(
        hdf5.build("hdf5", path, "train", fields={"x": "chunks", "y": "y"}, cache_mb=cache_mb)
    )
    assert source is not None

    def samples_of(progress: Progress) -> np.ndarray:
        return positions_of_rank(
            progress.samples, BATCH, rank, size, len(source), 0, shuffle=shuffle
        ).samples

    upcoming = Upcoming(
        source, samples_of, _following, size if isinstance(shuffle, BlocksOfRanks) else 1
    )

    def read(epoch: int) -> int:
        before = source.samples.cache.decoded
        for start in range(epoch * len(source), (epoch + 1) * len(source), BATCH):
            progress = Progress(len(source), 2**40, start // BATCH, start)
            if not isinstance(shuffle, BlockShuffle):  # whose windows fit into memory
                upcoming.reads(progress)
            source.read(samples_of(progress))
        return source.samples.cache.decoded - before

    return read


def _following(progress: Progress) -> Iterator[Progress]:
    while True:
        yield progress
        progress = progress.advance(BATCH)


def report(name: str, rates: dict[str, list[float]], options: argparse.Namespace) -> None:
    for method, found in rates.items():
        ratios = [rate / base for rate, base in zip(found, rates[BASE], strict=True)]
        row = {
            "array": name,
            "method": method,
            "samples_per_s": statistics.median(found),
            "range": [min(found), max(found)],
            "n": len(found),
        }
        row |= {
            "to_loader": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "samples": options.samples,
        }
        row |= {
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.processor() or platform.machine(),
            "h5py": h5py.__version__,
        }
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"{name:7} {method:34} {statistics.median(found):9,.0f} samples/s  x "
            f"{statistics.median(ratios):6.2f} ({span})"
        )
        if options.json:
            with options.json.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
