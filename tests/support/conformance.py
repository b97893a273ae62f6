"""Checks of the Communicator protocol, as one program for the ranks; it writes {check: failure or
""}.

python tests/support/conformance.py ENGINE OUT.json

Inputs differ by rank, expected values are formulas in rank and size: a check fails on an engine
whose collective does nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from hvdtrain.comm import horovod, mpi_calls
from hvdtrain.comm.communicator import (
    NUMBER_TYPES,
    Communicator,
    CompletedHandle,
    Op,
    part_of,
    point_to_point,
)
from hvdtrain.comm.engines import MEANINGS, features_of
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config import plugins
from hvdtrain.errors import UserError

Kind = Literal["numpy", "torch"]
# The result, and the expected kind, values and dtype. All collectives of a check run before its
# first claim is judged: a rank on which a claim fails must still reach the other collectives.
Claims = Iterator[tuple[Any, Kind, np.ndarray, str]]
# of the engine, and of the name that its collectives take
Check = Callable[[Communicator, str], Claims]

SHAPES = ((), (0,), (1,), (11,), (7, 3), (4, 0), (2, 3, 5))
ROWS: tuple[Callable[[int, int], int], ...] = (  # a rank's rows of an allgather, from rank and size
    lambda rank, size: 2,
    lambda rank, size: rank,
    lambda rank, size: size - rank - 1,
    lambda rank, size: 5 * (rank % 2),
    lambda rank, size: 0,
)
LARGE = 1_250_001  # elements; 5 MB of float32


def weights(shape: tuple[int, ...]) -> np.ndarray:
    """1 2 3 4 5 6 7 1 2 ...: neighbours differ. With 4 ranks every sum stays below 128, so it is
    exact in int8 and float16."""
    return (np.arange(math.prod(shape)) % 7 + 1).reshape(shape)


def share(shape: tuple[int, ...], rank: int, size: int) -> np.ndarray:
    """A rank's input: over all ranks each element is weights * (1 .. size), in an order that turns
    with the element."""
    return weights(shape) * ((np.arange(math.prod(shape)).reshape(shape) + rank) % size + 1)


def reduced(shape: tuple[int, ...], op: Op, size: int) -> np.ndarray:
    """What all shares together come to."""
    return weights(shape) * {"sum": size * (size + 1) // 2, "min": 1, "max": size}[op]


def ranked(shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Content that depends on rank and element, below 128, and whose parity does too."""
    return ((rank + 1) * 17 + np.arange(math.prod(shape)) % 3).reshape(shape)


def buffer(kind: Kind, values: np.ndarray, dtype: str) -> Any:
    array = np.array(values % 2 if dtype == "bool" else values, dtype)
    return torch.from_numpy(array) if kind == "torch" else array


def expect(result: Any, kind: Kind, values: np.ndarray, dtype: str) -> None:
    """The result has this type, dtype, shape and content, to the last bit."""
    wanted = np.array(values % 2 if dtype == "bool" else values, dtype)
    assert isinstance(result, torch.Tensor if kind == "torch" else np.ndarray), (
        f"a {kind} buffer became {type(result)}"
    )
    found = result.detach().numpy() if kind == "torch" else result
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (
        f"{found.dtype} {found.shape}, not {dtype} {wanted.shape}"
    )
    wrong = np.argwhere(found != wanted)
    assert not len(wrong), (
        f"{wanted.shape}: {len(wrong)} wrong: {found[tuple(wrong[0])]}, not "
        f"{wanted[tuple(wrong[0])]} at {tuple(wrong[0])}"
    )


def allreduce(op: Op, dtype: str, kind: Kind, communicator: Communicator, name: str) -> Claims:
    for shape in SHAPES:
        x = buffer(kind, share(shape, communicator.rank, communicator.size), dtype)
        yield (
            communicator.allreduce(x, f"{name} {shape}", op),
            kind,
            reduced(shape, op, communicator.size),
            dtype,
        )


def start_allreduce(dtype: str, kind: Kind, communicator: Communicator, name: str) -> Claims:
    """Several under way, waited for in another order than they were started in."""
    ops: tuple[Op, ...] = ("sum", "max", "min")
    under_way = []
    for shape, op in itertools.product(SHAPES, ops):
        x = buffer(kind, share(shape, communicator.rank, communicator.size), dtype)
        under_way.append((communicator.start_allreduce(x, f"{name} {shape} {op}", op), shape, op))
    for handle, shape, op in reversed(under_way):
        yield handle.wait(), kind, reduced(shape, op, communicator.size), dtype


def broadcast(dtype: str, kind: Kind, communicator: Communicator, name: str) -> Claims:
    for shape, root in itertools.product(SHAPES, sorted({0, communicator.size - 1})):
        x = buffer(kind, ranked(shape, communicator.rank), dtype)
        yield (
            communicator.broadcast(x, f"{name} {shape} {root}", root),
            kind,
            ranked(shape, root),
            dtype,
        )
    under_way = []
    for shape, root in itertools.product(SHAPES, range(communicator.size)):
        x = buffer(kind, ranked(shape, communicator.rank), dtype)
        under_way.append(
            (communicator.start_broadcast(x, f"{name} {shape} {root} start", root), shape, root)
        )
    for handle, shape, root in reversed(under_way):
        yield handle.wait(), kind, ranked(shape, root), dtype


def start_reduce(dtype: str, kind: Kind, communicator: Communicator, name: str) -> Claims:
    """Sums of several arrays; one rank gets each sum."""
    rank = communicator.rank
    size = communicator.size
    under_way = []
    for shape, root in itertools.product(SHAPES, range(size)):
        x = buffer(kind, share(shape, rank, size), dtype)
        under_way.append(
            (communicator.start_reduce(x, f"{name} {shape} {root}", root), shape, root)
        )
    for handle, shape, root in reversed(under_way):
        found = handle.wait()
        if rank == root:
            yield found, kind, reduced(shape, "sum", size), dtype


def reduce_scatter(dtype: str, kind: Kind, communicator: Communicator, name: str) -> Claims:
    size = communicator.size
    for shape in (*SHAPES[1:], (2 * size,), (size + 1, 2), (0, 3)):
        x = buffer(kind, share(shape, communicator.rank, size), dtype)
        part = np.array_split(reduced(shape, "sum", size), size)[communicator.rank]
        yield communicator.reduce_scatter(x, f"{name} {shape}"), kind, part, dtype


def sharded(dtype: str, kind: Kind, communicator: Communicator, name: str) -> Claims:
    """Reduces arrays to the ranks' parts and gathers them again: several at a time, also if some
    ranks have no part."""
    rank = communicator.rank
    size = communicator.size
    shapes = (
        (1,),
        (2 * size,),
        (3 * size + 1,),
        (0,),
        (70_001,),
        (1, 2),
        (2 * size + 1, 3),
        (0, 3),
    )
    sums = [
        communicator.start_reduce_scatter(
            buffer(kind, share(s, rank, size), dtype), f"{name} {s} to owners"
        )
        for s in shapes
    ]
    for shape, handle in zip(shapes, sums, strict=True):
        yield handle.wait(), kind, np.array_split(reduced(shape, "sum", size), size)[rank], dtype
    spread = []
    for shape in shapes:
        own = np.zeros(shape)
        own[part_of(shape[0], rank, size)] = np.array_split(weights(shape), size)[rank]
        spread.append(communicator.start_spread(buffer(kind, own, dtype), f"{name} {shape} spread"))
    for shape, handle in zip(shapes, spread, strict=True):
        yield handle.wait(), kind, weights(shape), dtype


def allgather(dtype: str, kind: Kind, communicator: Communicator, name: str) -> Claims:
    for rows, columns in itertools.product(ROWS, ((), (3,), (2, 1), (0,))):
        parts = [
            ranked((rows(rank, communicator.size), *columns), rank)
            for rank in range(communicator.size)
        ]
        x = buffer(kind, parts[communicator.rank], dtype)
        yield (
            communicator.allgather(x, f"{name} {ROWS.index(rows)} {columns}"),
            kind,
            np.concatenate(parts),
            dtype,
        )


def places(communicator: Communicator, name: str) -> Claims:
    """Ranks are 0 .. size - 1, and local ranks too, in any order: all test ranks share one host."""
    ranks, local_ranks, *sizes = zip(
        *communicator.allgather_object(
            (communicator.rank, communicator.local_rank, communicator.size, communicator.local_size)
        ),
        strict=True,
    )
    yield (
        np.array([ranks, sorted(local_ranks)]),
        "numpy",
        np.array([range(communicator.size)] * 2),
        "int64",
    )
    yield np.array(sizes), "numpy", np.full((2, communicator.size), communicator.size), "int64"


def features(communicator: Communicator, name: str) -> Claims:
    """A connected engine has all features of its file, none without a meaning, and returns early
    from start_allreduce() as it says."""
    handle = communicator.start_allreduce(np.ones(1), name)
    handle.wait()
    asynchronous = not isinstance(handle, CompletedHandle)
    known = features_of(communicator.name) <= communicator.features <= MEANINGS.keys()
    yield (
        np.array([known, asynchronous == ("asynchronous" in communicator.features)]),
        "numpy",
        np.ones(2),
        "bool",
    )


def allgather_object(communicator: Communicator, name: str) -> Claims:
    """Objects of uneven length, None, arrays, in rank order, again and again."""
    things = [
        {"rank": rank, "text": "x" * 3000 * rank, "nothing": None, "array": np.arange(rank)}
        for rank in range(communicator.size)
    ]
    same = [
        str(communicator.allgather_object(things[communicator.rank])) == str(things)
        for _ in range(3)
    ]
    yield np.array(same), "numpy", np.ones(3), "bool"


def broadcast_object(communicator: Communicator, name: str) -> Claims:
    """Broadcasts objects of uneven length, None and arrays from each rank in turn: all ranks get
    the root's object."""
    things = [
        {"rank": rank, "text": "x" * 3000 * rank, "nothing": None, "array": np.arange(rank)}
        for rank in range(communicator.size)
    ]
    found = [
        str(communicator.broadcast_object(things[communicator.rank], root))
        for root in range(communicator.size)
    ]
    yield (
        np.array(
            [found == [str(thing) for thing in things], communicator.broadcast_object(None) is None]
        ),
        "numpy",
        np.ones(2),
        "bool",
    )


def side_channel(communicator: Communicator, name: str) -> Claims:
    """Messages of every rank, large ones too, reach rank 0 by a second thread, while the main
    threads of the others are in a collective that rank 0 enters later."""
    for turn, length in enumerate((10, 1_000_000)):
        messages = [f"{rank} {turn} {'x' * (length + rank)}" for rank in range(communicator.size)]
        found: list[Any] = []
        thread = threading.Thread(
            target=_gather_into, args=(found, communicator, messages[communicator.rank], 600.0)
        )
        thread.start()
        if not communicator.rank:
            thread.join()
        rank_sum = communicator.allreduce(np.array([communicator.rank]), name)
        thread.join()
        # no gather begins before all have returned from this one
        communicator.allgather_object(None)
        yield (
            np.array([found == [[] if communicator.rank else messages]]),
            "numpy",
            np.ones(1),
            "bool",
        )
        yield (
            rank_sum,
            "numpy",
            np.array([communicator.size * (communicator.size - 1) // 2]),
            "int64",
        )


def side_channel_of_some(communicator: Communicator, name: str) -> Claims:
    """The last rank is late, then silent, then in time: None after the wait, no late reply to an
    old request, and no end with one."""
    rank = communicator.rank
    last = communicator.size - 1
    for turn, how in enumerate(("late", "silent", "in time")):
        missing = bool(last) and how != "in time"
        start = time.monotonic()
        found = list[Any]()
        if not (missing and rank == last):
            _gather_into(found, communicator, f"{rank} {turn}", 0.3 if missing else 600.0)
        seconds = time.monotonic() - start
        communicator.allgather_object(None)
        if missing and rank == last and how == "late":
            _gather_into(found, communicator, f"{rank} {turn}", 0.3)
        communicator.allgather_object(None)
        messages = [
            None if missing and one == last else f"{one} {turn}" for one in range(communicator.size)
        ]
        if missing and not rank:  # on a slow machine others may be late too
            messages = [
                message if theirs is not None else None
                for message, theirs in zip(messages, found[0], strict=True)
            ]
        expected = [messages] if not rank else [] if how == "silent" and rank == last else [[]]
        waited = seconds > 0.2 or not missing or rank > 0
        yield np.array([found == expected, waited]), "numpy", np.ones(2), "bool"


def _gather_into(found: list[Any], communicator: Communicator, message: str, wait_s: float) -> None:
    found.append(communicator.side_channel_gather(message, wait_s))


def many_steps(communicator: Communicator, name: str) -> Claims:
    """Uses the same names step after step with changing values; an allreduce, an allgather and a
    broadcast share one name."""
    rank = communicator.rank
    size = communicator.size
    for step in range(40):
        handles = [
            communicator.start_allreduce(np.full(5, step * (rank + 1.0 + i)), f"{name} {i}")
            for i in range(3)
        ]
        yield (
            communicator.allgather(np.array([step + rank]), f"{name} 0"),
            "numpy",
            np.arange(step, step + size),
            "int64",
        )
        yield (
            communicator.broadcast(np.array([step * 2 + rank]), f"{name} 0"),
            "numpy",
            np.array([step * 2]),
            "int64",
        )
        for i, handle in enumerate(handles):
            yield (
                handle.wait(),
                "numpy",
                np.full(5, step * (size * (size + 1) / 2 + size * i)),
                "float64",
            )


def large(kind: Kind, communicator: Communicator, name: str) -> Claims:
    """Megabytes through every collective."""
    rank = communicator.rank
    size = communicator.size
    shape = (LARGE,)
    dtype = "float32"
    total = reduced(shape, "sum", size)
    mine = share(shape, rank, size)
    parts = [ranked((LARGE // size + r,), r) for r in range(size)]
    handle = communicator.start_allreduce(buffer(kind, mine, dtype), f"{name} start")
    yield communicator.allreduce(buffer(kind, mine, dtype), name), kind, total, dtype
    yield (
        communicator.broadcast(buffer(kind, ranked(shape, rank), dtype), name),
        kind,
        ranked(shape, 0),
        dtype,
    )
    yield (
        communicator.reduce_scatter(buffer(kind, mine, dtype), name),
        kind,
        np.array_split(total, size)[rank],
        dtype,
    )
    yield (
        communicator.allgather(buffer(kind, parts[rank], dtype), name),
        kind,
        np.concatenate(parts),
        dtype,
    )
    yield handle.wait(), kind, total, dtype


def beyond_an_int(kind: Kind, communicator: Communicator, name: str) -> Claims:
    """More elements than C's int counts, with which MPI and Horovod count: here more than three."""
    with (
        mock.patch.object(mpi_calls, "MOST_COUNT", 3),
        mock.patch.object(horovod, "MOST_COUNT", 3),
        mock.patch.object(mpi_calls, "PIECE_BYTES", 8),
    ):
        found = [
            *start_allreduce("float32", kind, communicator, f"{name} sums"),
            *sharded("float32", kind, communicator, f"{name} shards"),
            *reduce_scatter("float32", kind, communicator, f"{name} parts"),
            *reduce_scatter("float16", kind, communicator, f"{name} halves"),
            *allgather("int64", kind, communicator, f"{name} rows"),
            *broadcast("uint8", kind, communicator, f"{name} bytes"),
        ]
    yield from found


def extremes(kind: Kind, communicator: Communicator, name: str) -> Claims:
    """int64 passes through no float, uint8 wraps around, and float16 beyond 65504 is inf without a
    warning: loss scaling looks for it."""
    rank = communicator.rank
    size = communicator.size
    # 0 + 1 + .. + size - 1
    big = 2**53 + 1
    ranks = size * (size - 1) // 2
    cases = {
        "int64": (big + rank, big * size + ranks),
        "uint8": (200 + rank, (200 * size + ranks) % 256),
    }
    for dtype, (mine, total) in {**cases, "float16": (4e4, 4e4 if size == 1 else np.inf)}.items():
        yield (
            communicator.allreduce(buffer(kind, np.array([mine]), dtype), f"{name} {dtype}"),
            kind,
            np.array([total]),
            dtype,
        )


def extremes_in_few_messages(communicator: Communicator, name: str) -> Claims:
    """What more than FEW_RANKS ranks of torchdist do for a small array of integers."""
    from hvdtrain.comm import torch_groups

    rank, size = communicator.rank, communicator.size
    ranks: Any = torch_groups.GroupRanks(communicator._group, rank, size)  # type: ignore[attr-defined]
    expected: dict[Any, list[int]] = {"max": [size - 1, 0], "min": [0, 1 - size]}
    for op, values in expected.items():
        found = torch.tensor([rank, -rank])
        torch_groups.extremes(found, op, ranks)
        yield found, "torch", np.array(values), "int64"


def kept_inputs(communicator: Communicator, name: str) -> Claims:
    """A read-only array is left alone, and a parameter that requires a gradient goes through."""
    shares = [share((6,), rank, communicator.size) for rank in range(communicator.size)]
    read_only = shares[communicator.rank].astype(np.float32)
    read_only.flags.writeable = False
    parameter = torch.from_numpy(read_only.copy()).requires_grad_()
    yield communicator.allreduce(read_only, f"{name} sum"), "numpy", sum(shares), "float32"
    yield (
        communicator.allgather(read_only, f"{name} all"),
        "numpy",
        np.concatenate(shares),
        "float32",
    )
    yield (
        communicator.broadcast(read_only, f"{name} last", communicator.size - 1),
        "numpy",
        shares[-1],
        "float32",
    )
    yield read_only, "numpy", shares[communicator.rank], "float32"
    yield communicator.allreduce(parameter, f"{name} parameter"), "torch", sum(shares), "float32"


def groups(communicator: Communicator, name: str) -> Claims:
    """Runs the collectives of the ranks of one color, of a group of all but the last rank, and of a
    group of all ranks; then of all ranks once more."""
    rank = communicator.rank
    size = communicator.size
    for turn, colors in enumerate(
        (
            [r % 2 for r in range(size)],
            [7 if r < size - 1 else None for r in range(size)],
            [3] * size,
        )
    ):
        group = communicator.split(colors[rank])
        members = [r for r in range(size) if colors[r] == colors[rank]]
        yield np.array([group is None]), "numpy", np.array([colors[rank] is None]), "bool"
        if group is None:
            continue
        placed = [group.rank, group.size, group.local_rank, group.local_size]
        yield np.array(placed), "numpy", np.array([members.index(rank), len(members)] * 2), "int64"
        yield (
            group.allgather(np.array([rank]), f"{name} {turn} ranks"),
            "numpy",
            np.array(members),
            "int64",
        )
        same = group.allgather_object({"rank": rank}) == [{"rank": member} for member in members]
        same = same and group.broadcast_object([rank], len(members) - 1) == [members[-1]]
        yield (
            np.array([same, group.side_channel_gather("x", 0.1) is None or group is communicator]),
            "numpy",
            np.ones(2),
            "bool",
        )
        for check in (
            partial(allreduce, "max", "float32", "torch"),
            partial(start_allreduce, "float64", "numpy"),
        ):
            yield from check(group, f"{name} {turn} reduced")
        for check in (broadcast, reduce_scatter, sharded, allgather):
            yield from check("float32", "torch", group, f"{name} {turn} {check.__name__}")
    yield (
        communicator.allreduce(np.array([rank]), f"{name} all"),
        "numpy",
        np.array([size * (size - 1) // 2]),
        "int64",
    )


def messages(communicator: Communicator, name: str) -> Claims:
    """Sends messages of every number type, empty and of 5 MB, from each rank to every other, also
    in a group, and receives them in another order.

    Without the feature "p2p": a UserError.
    """
    rank = communicator.rank
    size = communicator.size
    if "p2p" not in communicator.features:
        try:
            yield point_to_point(communicator, name), "numpy", np.array("a UserError"), "U"
        except UserError as error:
            yield (
                np.array(f"the {communicator.name} engine cannot send messages" in str(error)),
                "numpy",
                np.array(True),
                "bool",
            )
        return
    group_of_all = communicator.split(0)
    assert group_of_all is not None
    others = [other for other in range(size) if other != rank]
    for group in (point_to_point(communicator, name), point_to_point(group_of_all, name)):
        cases: list[tuple[Kind, str, tuple[int, ...]]] = [
            (kind, dtype, (rows, 2))
            for kind in ("numpy", "torch")
            for dtype in (*NUMBER_TYPES, "bool")
            for rows in (3, 0)
        ]
        cases.append(("torch", "float32", (LARGE,)))
        sent = []
        received = []
        for tag, (kind, dtype, shape) in enumerate(cases, start=1):
            sent += [
                group.start_send(buffer(kind, ranked(shape, rank) + other, dtype), other, name, tag)
                for other in others
            ]
        for tag, (kind, dtype, shape) in reversed(list(enumerate(cases, start=1))):
            for other in others:
                x = buffer(kind, np.zeros(shape), dtype)
                received.append(
                    (
                        group.start_recv(x, other, name, tag),
                        kind,
                        ranked(shape, other) + rank,
                        dtype,
                    )
                )
        half = torch.full((3,), rank + 1, dtype=torch.bfloat16)
        sent += [group.start_send(half, other, name) for other in others]
        for other in others:
            found = group.start_recv(torch.zeros_like(half), other, name).wait()
            yield found.float(), "torch", np.full(3, other + 1), "float32"
        for handle, *wanted in received:
            yield handle.wait(), *wanted
        for handle in sent:
            handle.wait()
        if rank == 0:
            senders = [
                (group.recv_from_any(x := np.empty(2, np.int64), name, 77), *x.tolist())
                for _ in others
            ]
            wanted = np.array([(other, other, 7) for other in others], np.int64)
            yield np.array(sorted(senders), np.int64), "numpy", wanted, "int64"
            if group.name == "mpi":
                yield np.array([refuses_pieces_from_any(group)]), "numpy", np.array([True]), "bool"
        else:
            group.start_send(np.array([rank, 7]), 0, name, 77).wait()


def refuses_pieces_from_any(group: Any) -> bool:
    """Whether the group rejects messages that could mix two senders: a message of 16 bytes in
    pieces of 8."""
    with mock.patch.object(mpi_calls, "PIECE_BYTES", 8):
        try:
            group.recv_from_any(np.empty(2, np.int64), "too large", 78)
        except ValueError as error:
            return str(error).startswith("16 bytes from any rank")
    return False


def refused(collective: str, x: Any, dtype: str, communicator: Communicator, name: str) -> Claims:
    """A UserError that names dtype, engine, collective and the buffer's name, on every rank, before
    anything is sent."""
    try:
        yield getattr(communicator, collective)(x, name), "numpy", np.array("a UserError"), "U"
    except UserError as error:
        missing = [
            word
            for word in (dtype, communicator.name, collective.removeprefix("start_"), name)
            if word not in str(error)
        ]
        assert not missing, f"{missing} not in the message: {error}"


def _table() -> dict[str, Check]:
    checks: dict[str, Check] = {
        "places": places,
        "features": features,
        "allgather_object": allgather_object,
        "broadcast_object": broadcast_object,
        "many_steps": many_steps,
        "kept_inputs": kept_inputs,
        "groups": groups,
        "messages": messages,
    }
    checks |= {"side_channel": side_channel, "side_channel_of_some": side_channel_of_some}
    for kind in ("numpy", "torch"):
        for dtype in (*NUMBER_TYPES, "bool"):
            at = f"{dtype}-{kind}"
            checks |= {
                f"broadcast-{at}": partial(broadcast, dtype, kind),
                f"allgather-{at}": partial(allgather, dtype, kind),
            }
            if dtype != "bool":
                checks |= {
                    f"allreduce-{op}-{at}": partial(allreduce, op, dtype, kind)
                    for op in ("sum", "min", "max")
                }
                checks |= {f"start_allreduce-{at}": partial(start_allreduce, dtype, kind)}
                checks |= {f"start_reduce-{at}": partial(start_reduce, dtype, kind)}
                checks |= {
                    f"reduce_scatter-{at}": partial(reduce_scatter, dtype, kind),
                    f"sharded-{at}": partial(sharded, dtype, kind),
                }
        checks |= {
            f"{f.__name__}-{kind}": partial(f, kind) for f in (large, beyond_an_int, extremes)
        }
    return checks


def _refusals() -> dict[str, Check]:
    strange = [
        np.ones(3, np.complex64),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bfloat16),
        np.ones(3, ">f4"),
    ]
    strange += [np.ones((4, 3)).T, torch.ones(4, 3).T, np.ones(6)[::2]]
    refusals = [
        (c, x)
        for c in ("allreduce", "start_allreduce", "broadcast", "reduce_scatter", "allgather")
        for x in strange
    ]
    # tests/support/strategies_on_ranks.py
    refusals = [
        (c, x)
        for c, x in refusals
        if x.dtype != torch.bfloat16 or c not in ("allreduce", "start_allreduce")
    ]
    refusals += [
        (c, x)
        for c in ("allreduce", "reduce_scatter")
        for x in (np.ones(3, bool), torch.ones(3).bool())
    ]
    refusals += [
        (c, x) for c in ("allgather", "reduce_scatter") for x in (np.array(1.0), torch.tensor(1.0))
    ]
    checks: dict[str, Check] = {}
    for collective, x in refusals:
        dtype = str(x.dtype).removeprefix("torch.")
        what = f"{collective}-{dtype}-{'x'.join(map(str, x.shape)) or 'scalar'}-{'torch' if torch.is_tensor(x) else 'numpy'}"  # noqa: E501
        checks[f"refused-{what}"] = partial(refused, collective, x, dtype)
    return checks


CHECKS = _table()
REFUSALS = _refusals()  # not for the engine of one process, which has nothing to send
OF_ONE_ENGINE: dict[str, dict[str, Check]] = {
    "torchdist": {"extremes_in_few_messages": extremes_in_few_messages}
}


def checks_of(engine: str) -> dict[str, Check]:
    if engine == "single":
        return CHECKS
    return CHECKS | REFUSALS | OF_ONE_ENGINE.get(engine, {})


def failures(communicator: Communicator) -> dict[str, str]:
    """{check: "" or the failure on this rank}"""
    found: dict[str, str] = {}
    for name, check in checks_of(communicator.name).items():
        try:
            for claim in list(
                check(communicator, name.removesuffix("-numpy").removesuffix("-torch"))
            ):
                expect(*claim)
            found[name] = ""
        except Exception as error:
            found[name] = (
                f"rank {communicator.rank} of {communicator.size}: {type(error).__name__}: {error}"
            )
    return found


def main(name: str, out: str) -> None:
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # as shard.group=node does
    communicator: Communicator = plugins.load("comm", name, "tests").connect(placement(os.environ))
    warnings.simplefilter("error")
    everyone = communicator.allgather_object(failures(communicator))
    if communicator.rank == 0:
        Path(out).write_text(
            json.dumps(
                {
                    check: "; ".join(filter(None, (mine[check] for mine in everyone)))
                    for check in everyone[0]
                }
            )
        )
    communicator.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
