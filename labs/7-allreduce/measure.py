"""Runs each schedule with MPI on all ranks, and measures it: started by lab.py on 2, 4 and 8 ranks.

python measure.py OUT.json SIZE [SIZE ...]     bytes of the array
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI
from schedules import SCHEDULES, Step

WORLD = MPI.COMM_WORLD
REPEATS = 9
ENOUGH_S = 0.6  # of one measurement


def allreduce(steps: list[Step], array: np.ndarray, spare: np.ndarray) -> None:
    """Adds up `array` over the ranks, in place; its length is a multiple of their number."""
    rank = WORLD.rank
    width = len(array) // WORLD.size
    for moves in steps:
        move = moves[rank]
        requests = []
        if move.receive is not None:
            other, first, last = move.receive
            requests.append(WORLD.Irecv(spare[first * width : last * width], other))
        if move.send is not None:
            to, start, end = move.send
            requests.append(WORLD.Isend(array[start * width : end * width], to))
        MPI.Request.Waitall(requests)
        if move.receive is not None:
            target = array[first * width : last * width]
            source = spare[first * width : last * width]
            np.add(target, source, target) if move.adds else np.copyto(target, source)


def seconds_of(call: Callable[[], None]) -> float:
    """The median over repetitions of the slowest rank's time."""
    times = []
    began = time.perf_counter()
    for turn in range(REPEATS + 1):
        WORLD.Barrier()
        start = time.perf_counter()
        call()
        times.append(WORLD.allreduce(time.perf_counter() - start, MPI.MAX))
        is_long = WORLD.bcast(time.perf_counter() - began > ENOUGH_S)
        if is_long and turn > 2:
            break
    return float(np.median(times[1:]))


def alone(call: Callable[..., object], *arguments: np.ndarray) -> float:
    """The median of rank 0's time while the others wait."""
    times = []
    if WORLD.rank == 0:
        for _ in range(REPEATS):
            start = time.perf_counter()
            call(*arguments)
            times.append(time.perf_counter() - start)
    return WORLD.bcast(float(np.median(times)) if times else 0.0)


def one_message(size_bytes: int) -> float:
    """Seconds of a message from rank 0 to rank 1: half of there and back."""
    array = np.ones(max(1, size_bytes // 4), np.float32)

    def there_and_back() -> None:
        if WORLD.rank == 0:
            WORLD.Send(array, 1)
            WORLD.Recv(array, 1)
        elif WORLD.rank == 1:
            WORLD.Recv(array, 0)
            WORLD.Send(array, 0)

    return seconds_of(there_and_back) / 2


def main() -> None:
    sizes = [int(word) for word in sys.argv[2:]]
    expected = WORLD.size * (WORLD.size + 1) / 2
    rows = []
    for size in sizes:
        count = max(1, size // 4 // WORLD.size) * WORLD.size
        spare = np.zeros(count, np.float32)
        row: dict[str, float] = {"bytes": 4 * count, "message": one_message(size)}
        array = np.zeros(count, np.float32)
        row["add"] = alone(np.add, array, spare, array)
        for name, schedule in SCHEDULES.items():
            steps = schedule(WORLD.size)
            array[:] = WORLD.rank + 1
            allreduce(steps, array, spare)
            assert (array == expected).all(), f"{name} is wrong"
            array[:] = 0.0
            row[name] = seconds_of(functools.partial(allreduce, steps, array, spare))
        row["MPI"] = seconds_of(functools.partial(WORLD.Allreduce, MPI.IN_PLACE, array))
        rows.append(row)
    if WORLD.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps({"ranks": WORLD.size, "rows": rows}))


main()
