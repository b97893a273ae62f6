"""bench allreduce: how fast the ranks add up numbers, against one plain MPI_Allreduce and a copy of memory, all in turn in one run.

Every way of doing it must first give the known sum of values that differ by rank. Its seconds are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.cli.bench import tables
from hvdtrain.cli.bench.on_ranks import Parser, on_ranks
from hvdtrain.cli.bench.tables import COPY, GROUPED, MPI, Row, Timing
from hvdtrain.cli.check.speed import plain_mpi
from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import Placement, placement
from hvdtrain.config.read import configure
from hvdtrain.errors import UserError

SIZES = "1,64,1KiB,16KiB,256KiB,1MiB,4MiB,16MiB,64MiB,100MB"
ROUNDS, MOST_ROUNDS, WARM_UP = 5, 101, 2
QUIET_S = 2.0  # a run that takes longer tells how far it is
GROUP = "160 small tensors"
# Channels of ResNet-50's 53 norms, in order: each has a weight and a bias; repeated up to 160 tensors of 64 to 2048 numbers.
_BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))
_NORMS = [64, *(n for width, blocks in _BLOCKS for n in (4 * width, *(width, width, 4 * width) * blocks))]
SMALL = [_NORMS[place // 2 % len(_NORMS)] for place in range(160)]
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Way(NamedTuple):
    """One way to make `numbers` the sum over ranks, in place; the copy alone leaves them as they are."""

    name: str
    act: Callable[[], object]


class Ranks(NamedTuple):
    """Who adds up."""

    communicator: Communicator
    world: Any | None  # of mpi4py, where MPI runs
    bucket_bytes: int


def bench_allreduce(words: Sequence[str]) -> int:
    """The command behind `bench allreduce`; returns the exit code. Every rank calls it, rank 0 speaks."""
    asked, rest = _parse(words)
    given = configure(asked.config, rest)

    def work(communicator: Communicator, why: str) -> None:
        ranks = Ranks(communicator, _world(communicator, placement(os.environ)), max(4, int(given[0].comm.bucket_mb * 2**20)))
        rows = measure(ranks, asked.sizes, asked.budget)
        hosts = communicator.allgather_object((socket.gethostname(), len(os.sched_getaffinity(0))))
        if communicator.rank == 0:
            facts = {"engine": communicator.name, "why": why, "ranks": communicator.size, "bucket_bytes": ranks.bucket_bytes}
            facts |= tables.hosts_of(hosts)
            tables.tell(asked.json, tables.allreduce_text(facts, rows), tables.allreduce_tree(facts, rows))

    return on_ranks(given, work)


def _world(communicator: Communicator, place: Placement) -> Any | None:
    """MPI itself on all ranks, or on none: where the engine runs on it, by a communicator of our own."""
    if "plain_mpi" not in communicator.features and not plain_mpi(communicator, place):
        return None
    from hvdtrain.comm import mpi

    return mpi.load().COMM_WORLD.Dup()


def measure(ranks: Ranks, sizes: Sequence[int], budget_s: float) -> list[Row]:
    """Every size in all ways, then many small tensors at once. Every rank calls it, and has the same numbers."""
    share_s, began = budget_s / (len(sizes) + 1), time.perf_counter()
    rows: list[Row] = []
    for place, size in enumerate(sizes):
        numbers = np.empty(*((size // 4, np.float32) if size % 4 == 0 else (size, np.uint8)))
        rows.append(Row(tables.bytes_words(size), size, _times(ranks, numbers, list(_whole(ranks, numbers)), share_s)))
        if ranks.communicator.rank == 0 and time.perf_counter() - began > QUIET_S:
            print(f"bench allreduce: {rows[-1].name} done, {place + 1} of {len(sizes) + 1}", file=sys.stderr, flush=True)
    numbers = np.empty(sum(SMALL), np.float32)
    rows.append(Row(GROUP, numbers.nbytes, _times(ranks, numbers, list(_grouped(ranks, numbers)), share_s)))
    return rows


def _whole(ranks: Ranks, numbers: np.ndarray) -> Iterator[Way]:
    """The ways to add up one vector."""
    communicator, other = ranks.communicator, np.empty_like(numbers)
    name = f"bench.{numbers.nbytes}"
    each = max(1, ranks.bucket_bytes // numbers.itemsize)
    buckets = [numbers[start : start + each] for start in range(0, len(numbers), each)]
    if (world := ranks.world) is not None:
        from hvdtrain.comm import mpi

        in_place = mpi.load().IN_PLACE
        yield Way(MPI, lambda: world.Allreduce(in_place, numbers))
    yield Way("allreduce", lambda: _keep(numbers, communicator.allreduce(numbers, name)))
    yield Way(f"in {len(buckets)} bucket{'s' * (len(buckets) > 1)}", lambda: _together(communicator, buckets, name))
    yield Way(COPY, lambda: np.copyto(other, numbers))


def _grouped(ranks: Ranks, numbers: np.ndarray) -> Iterator[Way]:
    """The ways to add up many small tensors: those that fill one buffer copy them in and out, which counts."""
    communicator, flat = ranks.communicator, np.empty_like(numbers)
    parts = np.split(numbers, np.cumsum(SMALL)[:-1])
    rooms = np.split(flat, np.cumsum(SMALL)[:-1])

    def packed(reduce: Callable[[], np.ndarray]) -> None:
        for room, part in zip(rooms, parts, strict=True):
            room[...] = part
        _keep(flat, reduce())
        for room, part in zip(rooms, parts, strict=True):
            part[...] = room

    if (world := ranks.world) is not None:
        from hvdtrain.comm import mpi

        in_place = mpi.load().IN_PLACE

        def by_mpi() -> np.ndarray:
            world.Allreduce(in_place, flat)
            return flat

        yield Way(MPI, lambda: packed(by_mpi))
    yield Way("as one bucket", lambda: packed(lambda: communicator.start_allreduce(flat, "bench.packed").wait()))
    yield Way("each by its name", lambda: _together(communicator, parts, "bench.small"))
    if "horovod_api" in communicator.features:
        from hvdtrain.comm import horovod

        torch, hvd = horovod.load()
        tensors = [torch.from_numpy(part) for part in parts]
        yield Way(GROUPED, lambda: hvd.grouped_allreduce_(tensors, name="bench.grouped", op=hvd.Sum))
    yield Way(COPY, lambda: np.copyto(flat, numbers))


def _together(communicator: Communicator, parts: Sequence[np.ndarray], name: str) -> None:
    """All started, then waited for."""
    handles = [communicator.start_allreduce(part, f"{name}.{place}") for place, part in enumerate(parts)]
    for part, handle in zip(parts, handles, strict=True):
        _keep(part, handle.wait())


def _keep(room: np.ndarray, result: np.ndarray) -> None:
    """An engine may give other memory than it got."""
    if result is not room:
        room[...] = result


def _times(ranks: Ranks, numbers: np.ndarray, ways: Sequence[Way], share_s: float) -> list[Timing]:
    """Seconds of each way, the slowest rank's of each round: all ways once in a round, each round beginning with another."""
    for way in ways:
        check(ranks.communicator, numbers, way)
    numbers.fill(0)  # sums stay in place and would grow without end: only zeros stay what they are
    began = time.perf_counter()
    for _ in range(WARM_UP):
        _round(ranks, ways, 0)
    round_s = float(ranks.communicator.allreduce(np.array([(time.perf_counter() - began) / WARM_UP]), "bench.round", "max")[0])
    rounds = int(min(MOST_ROUNDS, max(ROUNDS, share_s / round_s)))  # the same on every rank, for round_s is
    mine = np.array([_round(ranks, ways, turn) for turn in range(rounds)])
    slowest = ranks.communicator.allreduce(mine, "bench.slowest", "max")  # (rounds, ways)
    return [Timing(way.name, [float(s) for s in slowest[:, place]]) for place, way in enumerate(ways)]


def _round(ranks: Ranks, ways: Sequence[Way], turn: int) -> list[float]:
    seconds = [0.0] * len(ways)
    for step in range(len(ways)):
        place = (turn + step) % len(ways)
        if ranks.world is not None:
            ranks.world.Barrier()
        else:
            ranks.communicator.allreduce(np.zeros(1, np.float32), "bench.barrier")
        began = time.perf_counter()
        ways[place].act()
        seconds[place] = time.perf_counter() - began
    return seconds


def check(communicator: Communicator, numbers: np.ndarray, way: Way) -> None:
    """Rank r's number i is (r + 1) x (i % 7 + 1): its sum over n ranks is n (n + 1) / 2 x (i % 7 + 1)."""
    pattern = (np.arange(len(numbers)) % 7 + 1).astype(numbers.dtype)
    numbers[...] = pattern * numbers.dtype.type((communicator.rank + 1) % 256)
    way.act()
    factor = communicator.rank + 1 if way.name == COPY else communicator.size * (communicator.size + 1) // 2
    expected = pattern * numbers.dtype.type(factor % 256 if numbers.dtype == np.uint8 else factor)
    wrong = int((numbers != expected).sum())
    if any(told := communicator.allgather_object(wrong)):
        where = f"{way.name}, comm.engine={communicator.name}, {numbers.nbytes} bytes"
        raise UserError(f"wrong sums on ranks {[rank for rank, count in enumerate(told) if count]}", where, "python -m hvdtrain check")


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser("allreduce")
    parser.add_argument("--sizes", type=read_sizes, default=SIZES)
    parser.add_argument("--budget", type=float, default=40.0)
    return parser.parse_known_args(words)


def read_sizes(text: str) -> list[int]:
    """ "1KiB,100MB" -> [1024, 100000000]"""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)\s*(|B|[KMG]i?B)", part.strip(), re.ASCII | re.IGNORECASE)
        if not match or not (size := int(match[1]) * _UNITS[match[2].upper() or "B"]):
            raise UserError(f"cannot read the size {part!r}", "--sizes", "bytes, as in --sizes 64,1KiB,4MiB,100MB")
        sizes.append(size)
    return sorted(set(sizes))
