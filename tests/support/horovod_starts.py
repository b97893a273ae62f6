"""init() of some ranks and again after shutdown(), bits of fused reductions, the timeline, as one program for 3 ranks of MPI.

python tests/support/horovod_starts.py OUT.json FOLDER        writes {check: what it found on each rank}
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import hvdtrain.horovod as hvd
from hvdtrain.errors import UserError

FOLDER = Path(sys.argv[2])


def sum_of_ranks() -> list[float]:
    """Rank, size, and the sum of the ranks' numbers in the world, by a small and a large
    reduction."""
    x = torch.full((9000,), float(MPI.COMM_WORLD.rank + 1))
    return [
        hvd.rank(),
        hvd.size(),
        hvd.allreduce(x[:2], op=hvd.Sum)[0].item(),
        hvd.allreduce(x, op=hvd.Sum)[-1].item(),
    ]


def some_ranks() -> Any:
    """Ranks 0 and 2 of the world; rank 1 is refused."""
    try:
        hvd.init(comm=[0, 2])
    except UserError as error:
        return str(error).splitlines()[0]
    found = sum_of_ranks()
    hvd.shutdown()
    return found


def communicators() -> Any:
    """Two jobs side by side: of the even and the odd ranks. Their user's own messages on the
    communicator do not disturb."""
    own = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    hvd.init(comm=own)
    handle = hvd.allreduce_async(torch.ones(9000), op=hvd.Sum)
    own.allreduce(1)
    found = [*sum_of_ranks(), hvd.synchronize(handle)[0].item()]
    hvd.shutdown()
    return found


def again() -> Any:
    """After shutdown() calls fail, process sets are gone, and init() starts again."""
    found = []
    for _turn in range(2):
        hvd.init()
        one = hvd.add_process_set([0])
        found.append([*sum_of_ranks(), one.process_set_id])
        hvd.shutdown()
        try:
            hvd.rank()
        except ValueError as error:
            found.append(str(error).splitlines()[0])
        assert one.process_set_id is None
    return found


def digest(seed: int, delays: random.Random) -> str:
    """Returns a digest of the results of 80 reductions, which each rank starts and waits for in its
    own order, with delays."""
    dice = random.Random(seed * 100 + hvd.rank())
    made = torch.Generator().manual_seed(seed * 100 + hvd.rank())
    tensors = [torch.randn(1 + i * i % 3000, generator=made) * 10 ** (i % 5) for i in range(80)]
    handles = []
    for i in dice.sample(range(80), 80):
        handles.append((i, hvd.allreduce_async(tensors[i], name=f"bits {i}")))
        if dice.random() < 0.1:
            hvd.poll(handles[-1][1])
        if delays.random() < 0.1:
            time.sleep(delays.random() * 0.01)
    dice.shuffle(handles)
    results = {i: hvd.synchronize(handle).numpy().tobytes() for i, handle in handles}
    return hashlib.sha256(b"".join(results[i] for i in sorted(results))).hexdigest()


def bits() -> Any:
    """One digest for each of four programs of the same calls, whose ranks are late at other
    places."""
    hvd.init()
    found = [digest(1, random.Random(turn * 10 + hvd.rank())) for turn in range(4)]
    other = digest(2, random.Random(0))
    hvd.shutdown()
    return [len(set(found)), other != found[0]]


def timeline() -> Any:
    """{call: [events of waiting, events of making, tensors in a collective]} of each rank's own
    file; rank 0's alone, by a plain path."""
    hvd.init()
    for path, marks in ((FOLDER / "own-{rank}.json", True), (FOLDER / "first.json", False)):
        hvd.start_timeline(str(path), mark_cycles=marks)
        handles = [hvd.allreduce_async(torch.ones(5000), name=f"grad {i}") for i in range(3)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.broadcast(torch.ones(2), 0, name="small")
        hvd.allgather(torch.ones(2, 3), name="rows")
        hvd.stop_timeline()
        hvd.barrier()
    own = json.loads((FOLDER / f"own-{hvd.rank()}.json").read_text())
    first = json.loads((FOLDER / "first.json").read_text())
    assert {event["pid"] for event in own} == {hvd.rank()} and {
        event["pid"] for event in first
    } == {0}
    hvd.shutdown()
    return [
        _calls(own),
        _calls(first),
        [any(event["name"] == "CYCLE_START" for event in events) for events in (own, first)],
    ]


def _calls(events: list[dict[str, Any]]) -> dict[str, Any]:
    rows = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    found: dict[str, Any] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            more = event["args"].get("tensors_in_collective")
            found.setdefault(rows[event["tid"]], []).append(
                [event["name"], event["args"]["shape"], more]
            )
    return found


CHECKS: tuple[Callable[[], Any], ...] = (some_ranks, communicators, again, bits, timeline)


def main() -> None:
    found = {check.__name__: MPI.COMM_WORLD.gather(check()) for check in CHECKS}
    if MPI.COMM_WORLD.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
