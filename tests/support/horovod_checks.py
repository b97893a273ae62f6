"""Checks of Horovod's documented API, as one program for the ranks; it writes {check: failure or ""}.

python tests/support/horovod_checks.py MODULE OUT.json      MODULE: hvdtrain.horovod, or horovod.torch for Horovod's own
HVDTRAIN_TEST_DEVICE=cuda: with tensors on the GPU

Inputs differ by rank, and expected values are formulas in rank and size, worked out by NumPy: a call that does nothing fails.
"""  # noqa: E501

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPES = ((1,), (17,), (5, 3), (2, 3, 4), (), (0,))
REDUCED = ("int32", "int64", "float16", "float32", "float64")
MORE_REDUCED = ("uint8", "int8", "int16", "bfloat16", "bool", "complex64", "complex128")
MOVED = ("uint8", "int8", "int16", *REDUCED)
MORE_MOVED = ("bfloat16", "bool", "complex64", "complex128")
OPS = ("Average", "Sum", "Min", "Max", "Product")
TOLERANCE = {
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "float32": 1e-6,
    "float64": 1e-14,
    "complex64": 1e-6,
    "complex128": 1e-14,
}
Claims = Iterator[tuple[Any, Any]]  # found, expected
Check = Callable[[Any], Claims]


def given(shape: tuple[int, ...], rank: int, dtype: str) -> torch.Tensor:
    """1 2 3 1 2 3 ... from a place that depends on the rank: products of 4 ranks are exact in every
    dtype, and below 128."""
    numbers = torch.from_numpy(
        np.array((np.arange(math.prod(shape)) + rank) % 3 + 1).reshape(shape)
    )
    numbers = numbers.to(torch.get_default_device())
    if dtype == "bool":
        return numbers == 2
    return (
        (numbers * (1 - 2j)).to(getattr(torch, dtype))
        if dtype.startswith("complex")
        else numbers.to(getattr(torch, dtype))
    )


def reduced(
    shape: tuple[int, ...],
    ranks: list[int],
    dtype: str,
    op: str,
    before: float = 1.0,
    after: float = 1.0,
) -> np.ndarray:
    """By NumPy, in a type in which nothing rounds."""
    parts = [wide(given(shape, rank, dtype)) for rank in ranks]
    is_integer = dtype.startswith(("int", "uint"))
    if before != 1.0:
        parts = [np.trunc(part * before) if is_integer else part * before for part in parts]
    function = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}.get(op, np.add)
    total = parts[0]
    for part in parts[1:]:
        total = function(total, part)
    factor = after / (len(ranks) if op == "Average" else 1)
    return (
        total
        if factor == 1.0
        else np.trunc(total * factor + 1e-9)
        if is_integer
        else total * factor
    )


def wide(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.cpu()
    if tensor.dtype == torch.bool:
        return tensor.numpy()
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64).numpy()


def parts_of(
    ranks: list[int], rows: Callable[[int], int], rest: tuple[int, ...], dtype: str
) -> list[np.ndarray]:
    return [wide(given((rows(rank), *rest), rank, dtype)) for rank in ranks]


def allreduce(dtype: str, op: str, hvd: Any) -> Claims:
    rank = hvd.rank()
    ranks = list(range(hvd.size()))
    number = getattr(hvd, op)
    for shape in SHAPES:
        x = given(shape, rank, dtype)
        expected = reduced(shape, ranks, dtype, op)
        name = f"allreduce {dtype} {op} {shape}"
        found = hvd.allreduce(x, op=number, name=name)
        yield found, (expected, dtype)
        yield x, (wide(given(shape, rank, dtype)), dtype)  # the input is left alone
        handle = hvd.allreduce_async(x, op=number, name=name)
        yield hvd.synchronize(handle), (expected, dtype)
        in_place = x.clone()
        result = hvd.allreduce_(in_place, op=number)
        yield result, (expected, dtype)
        yield in_place, (expected, dtype)
        in_place = x.clone()
        hvd.synchronize(hvd.allreduce_async_(in_place, op=number))
        yield in_place, (expected, dtype)
    tensors = [given(s, rank, dtype) for s in SHAPES[:4]]
    expected_list = [reduced(s, ranks, dtype, op) for s in SHAPES[:4]]
    for found, expected in zip(
        hvd.grouped_allreduce(tensors, op=number), expected_list, strict=True
    ):
        yield found, (expected, dtype)
    in_place_list = [tensor.clone() for tensor in tensors]
    hvd.synchronize(
        hvd.grouped_allreduce_async_(in_place_list, op=number, name=f"group {dtype} {op}")
    )
    for found, expected in zip(in_place_list, expected_list, strict=True):
        yield found, (expected, dtype)


def factors(dtype: str, hvd: Any) -> Claims:
    """prescale and postscale, with every op."""
    rank = hvd.rank()
    ranks = list(range(hvd.size()))
    for op, (before, after) in itertools.product(OPS, ((0.5, 1.0), (1.0, 3.0), (2.0, 0.5))):
        found = hvd.allreduce(
            given((9,), rank, dtype),
            op=getattr(hvd, op),
            prescale_factor=before,
            postscale_factor=after,
        )
        yield found, (reduced((9,), ranks, dtype, op, before, after), dtype)


def many(hvd: Any) -> Claims:
    """Many under way, waited for in another order; mixed kinds, dtypes and sizes; the same names in
    the next turn."""
    rank = hvd.rank()
    ranks = list(range(hvd.size()))
    for _turn in range(3):
        under_way: list[tuple[int, Any]] = []
        for i, dtype in itertools.product(range(25), ("float32", "float64", "int64")):
            shape = (1 + i * i,)
            handle = hvd.allreduce_async(
                given(shape, rank, dtype), op=hvd.Sum, name=f"many {i} {dtype}"
            )
            under_way.append((handle, (reduced(shape, ranks, dtype, "Sum"), dtype)))
            handle = hvd.broadcast_async(
                given(shape, rank, dtype), i % len(ranks), name=f"many broadcast {i} {dtype}"
            )
            under_way.append((handle, (wide(given(shape, i % len(ranks), dtype)), dtype)))
        for handle, expected in under_way[::-2] + under_way[::2]:
            found = hvd.synchronize(handle)
            if found is not None:
                yield found, expected


def large(hvd: Any) -> Claims:
    """Tests tensors larger than any fusion buffer, together with small ones."""
    rank = hvd.rank()
    ranks = list(range(hvd.size()))
    shape = (3_000_001,)
    handles = [
        hvd.allreduce_async(given(s, rank, "float32"), op=hvd.Average)
        for s in (shape, (5,), shape, (7,))
    ]
    for handle, s in zip(handles, (shape, (5,), shape, (7,)), strict=True):
        yield hvd.synchronize(handle), (reduced(s, ranks, "float32", "Average"), "float32")
    # two of them are beyond the buffer on rank 0 alone
    rows = [700_000 if r == 0 else 3 for r in ranks]
    handles = [
        hvd.allgather_async(given((rows[rank],), rank, "float32"), name=f"uneven {i}")
        for i in range(2)
    ]
    for handle in handles:
        yield (
            hvd.synchronize(handle),
            (np.concatenate(parts_of(ranks, lambda r: rows[r], (), "float32")), "float32"),
        )


def allgather(dtype: str, hvd: Any) -> Claims:
    rank = hvd.rank()
    ranks = list(range(hvd.size()))
    for rest in ((), (3,), (2, 2)):
        for rows in (lambda r: 2, lambda r: r + 1, lambda r: r % 2, lambda r: 0):
            parts = parts_of(ranks, rows, rest, dtype)
            x = given((rows(rank), *rest), rank, dtype)
            yield hvd.allgather(x), (np.concatenate(parts), dtype)
            yield (
                hvd.synchronize(hvd.allgather_async(x, name=f"gather {dtype}")),
                (np.concatenate(parts), dtype),
            )
    several = [given((rank + 1 + i, 2), rank, dtype) for i in range(3)]
    for i, found in enumerate(hvd.grouped_allgather(several, name=f"grouped gather {dtype}")):
        yield found, (np.concatenate(parts_of(ranks, lambda r, i=i: r + 1 + i, (2,), dtype)), dtype)  # type: ignore[misc]


def broadcast(dtype: str, hvd: Any) -> Claims:
    rank = hvd.rank()
    for shape, root in itertools.product(SHAPES, range(hvd.size())):
        x = given(shape, rank, dtype)
        expected = (wide(given(shape, root, dtype)), dtype)
        yield hvd.broadcast(x, root), expected
        yield x, (wide(given(shape, rank, dtype)), dtype)
        in_place = x.clone()
        yield hvd.broadcast_(in_place, root_rank=root, name=f"broadcast {dtype} {shape}"), expected
        yield in_place, expected
        in_place = x.clone()
        handle = hvd.broadcast_async_(in_place, root)
        hvd.synchronize(handle)
        yield in_place, expected


def alltoall(dtype: str, hvd: Any) -> Claims:
    rank = hvd.rank()
    size = hvd.size()
    for rest in ((), (3,)):
        sources = parts_of(list(range(size)), lambda r: 2 * size, rest, dtype)
        yield (
            hvd.alltoall(given((2 * size, *rest), rank, dtype)),
            (np.concatenate([s[2 * rank : 2 * rank + 2] for s in sources]), dtype),
        )
        splits = {r: [(r + to) % 3 for to in range(size)] for r in range(size)}
        sources = parts_of(list(range(size)), lambda r, splits=splits: sum(splits[r]), rest, dtype)
        expected = np.concatenate(
            [s[sum(splits[r][:rank]) : sum(splits[r][: rank + 1])] for r, s in enumerate(sources)]
        )
        x = given((sum(splits[rank]), *rest), rank, dtype)
        for own in (splits[rank], torch.tensor(splits[rank], dtype=torch.int32)):
            found, received = hvd.alltoall(x, splits=own, name=f"alltoall {dtype}")
            yield found, (expected, dtype)
            yield received, (np.array([splits[r][rank] for r in range(size)]), "int32")


def reducescatter(dtype: str, op: str, hvd: Any) -> Claims:
    rank = hvd.rank()
    ranks = list(range(hvd.size()))
    number = getattr(hvd, op)
    for shape in ((8,), (7, 3), (1, 2), (5, 2, 2)):
        expected = np.array_split(reduced(shape, ranks, dtype, op), len(ranks))[rank]
        x = given(shape, rank, dtype)
        yield hvd.reducescatter(x, op=number), (expected, dtype)
        yield (
            hvd.synchronize(hvd.reducescatter_async(x, op=number, name=f"scatter {dtype}")),
            (expected, dtype),
        )
    for shape, found in zip(
        ((6,), (3, 2)),
        hvd.grouped_reducescatter([given(s, rank, dtype) for s in ((6,), (3, 2))], op=number),
        strict=True,
    ):
        yield found, (np.array_split(reduced(shape, ranks, dtype, op), len(ranks))[rank], dtype)


def gradients(hvd: Any) -> Claims:
    """Checks the gradient of each collective; every rank's loss is sum(rank-dependent weights *
    result)."""
    rank = hvd.rank()
    size = hvd.size()
    weights = [np.arange(1.0, 5.0) * (r + 1) for r in range(size)]
    total = np.sum(weights, axis=0)

    def gradient(
        call: Callable[[torch.Tensor], torch.Tensor], rows: int = 4, factor: float = 1.0
    ) -> torch.Tensor:
        x = torch.ones(rows, dtype=torch.float64, requires_grad=True)
        result = call(x)
        weight = torch.from_numpy(np.resize(weights[rank], result.shape)).to(result.device) * factor
        (result * weight).sum().backward()
        assert x.grad is not None
        return x.grad

    yield gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)), (total, "float64")
    yield gradient(lambda x: hvd.allreduce(x, op=hvd.Average)), (total / size, "float64")
    yield (
        gradient(lambda x: hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)[1]),
        (2 * total, "float64"),
    )
    yield gradient(lambda x: hvd.broadcast(x, 0)), (total / size * (rank == 0), "float64")
    yield gradient(hvd.allgather), (total / size, "float64")
    yield gradient(lambda x: hvd.grouped_allgather([x])[0]), (total / size, "float64")
    rows = np.resize(np.arange(1.0, 5.0), (4 * size,))  # of every rank's weights, with its factor
    yield (
        gradient(lambda x: hvd.reducescatter(x, op=hvd.Average), 4 * size),
        (np.repeat(np.arange(1, size + 1), 4) * rows, "float64"),
    )
    yield (
        gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), 4 * size),
        (size * np.repeat(np.arange(1, size + 1), 4) * rows, "float64"),
    )
    scattered = np.concatenate(
        [np.resize(weights[r], 4 * size)[4 * rank : 4 * rank + 4] for r in range(size)]
    )
    yield gradient(hvd.alltoall, 4 * size), (scattered, "float64")


def gradients_twice(hvd: Any) -> Claims:
    """backward() again through one collective, and through each tensor of a group, adds up: nothing
    is freed by the first one."""
    rank = hvd.rank()
    size = hvd.size()
    weight = np.arange(1.0, 5.0) * (rank + 1)
    total = np.arange(1.0, 5.0) * size * (size + 1) / 2
    x, a, b = (torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    result = hvd.allreduce(x, op=hvd.Sum)
    for _ in range(2):
        result.backward(torch.from_numpy(weight).to(x.device))
    yield x.grad, (2 * total, "float64")
    for factor, summed in enumerate(hvd.grouped_allreduce([a, b], op=hvd.Sum), 1):
        summed.backward(torch.from_numpy(weight * factor).to(a.device))
    yield a.grad, (total, "float64")
    yield b.grad, (2 * total, "float64")


def gradients_of_extremes(hvd: Any) -> Claims:
    """The derivatives of Min, Max and Product, twice through the same result; and the second
    derivative of a product."""
    rank = hvd.rank()
    size = hvd.size()
    total = size * (size + 1) / 2  # of the ranks' weights
    expected = {
        hvd.Min: total * (rank == 0),
        hvd.Max: total * (rank == size - 1),
        hvd.Product: total * math.factorial(size) / (rank + 1),
    }
    for op, derivative in expected.items():
        x = torch.full((3,), rank + 1.0, dtype=torch.float64, requires_grad=True)
        result = hvd.allreduce(x, op=op)
        for _ in range(2):
            result.backward(torch.full((3,), rank + 1.0, dtype=torch.float64))
        yield x.grad, (np.full(3, 2 * derivative), "float64")
    x = torch.full((3,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    # 2 x size others^2
    (first,) = torch.autograd.grad(hvd.allreduce(x * x, op=hvd.Product).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    others = (math.factorial(size) / (rank + 1)) ** 2
    # d/dx of this rank's and of every other rank's first derivative, which are size * P^2 * 2 / x_r
    # for the product P of all
    of_others = (
        sum(4.0 / (r + 1) / (rank + 1) for r in range(size) if r != rank)
        * math.factorial(size) ** 2
    )
    yield second, (np.full(3, size * (2 * others + of_others)), "float64")


def process_sets(hvd: Any) -> Claims:
    """Tests sets of some ranks at the same time as each other and as all ranks; each rank waits in
    another order."""
    rank = hvd.rank()
    size = hvd.size()
    if size == 1:  # every set of ranks is the set of all ranks
        yield np.array([hvd.global_process_set.rank()]), (np.zeros(1), "int64")
        return
    evens = list(range(0, size, 2))
    odds = list(range(1, size, 2))
    added = [hvd.add_process_set(hvd.ProcessSet(evens)), hvd.add_process_set(odds)]
    own = added[rank % 2]
    ranks = own.ranks
    yield (
        np.array([own.size(), own.rank(), own.included()]),
        (np.array([len(ranks), ranks.index(rank), True]), "int64"),
    )
    for turn in range(4):
        handles = {
            "set": hvd.allreduce_async(
                given((5,), rank, "float32"), op=hvd.Sum, process_set=own, name="sets"
            ),
            "all": hvd.allreduce_async(given((5,), rank, "float32"), op=hvd.Sum, name="all"),
        }
        expected = {
            "set": reduced((5,), ranks, "float32", "Sum"),
            "all": reduced((5,), list(range(size)), "float32", "Sum"),
        }
        for which in sorted(handles, reverse=bool((rank + turn) % 2)):
            yield hvd.synchronize(handles[which]), (expected[which], "float32")
    yield (
        hvd.allgather(given((rank + 1,), rank, "int64"), process_set=own),
        (np.concatenate(parts_of(ranks, lambda r: r + 1, (), "int64")), "int64"),
    )
    yield (
        hvd.broadcast(given((3,), rank, "float64"), ranks[-1], process_set=own),
        (wide(given((3,), ranks[-1], "float64")), "float64"),
    )
    found, received = hvd.alltoall(
        given((len(ranks),), rank, "int32"), splits=[1] * len(ranks), process_set=own
    )
    yield (
        found,
        (np.array([wide(given((len(ranks),), r, "int32"))[own.rank()] for r in ranks]), "int32"),
    )
    yield received, (np.ones(len(ranks)), "int32")
    part = np.array_split(reduced((5,), ranks, "float64", "Sum"), len(ranks))[own.rank()]
    yield (
        hvd.reducescatter(given((5,), rank, "float64"), op=hvd.Sum, process_set=own),
        (part, "float64"),
    )
    hvd.barrier(process_set=own)
    hvd.barrier()
    for process_set in added[::-1]:
        yield (
            np.array([hvd.remove_process_set(process_set), process_set.process_set_id is None]),
            (np.ones(2), "bool"),
        )


def join(hvd: Any) -> Claims:
    """Rank r has r + 1 batches: sums and averages are over the ranks that still have a batch. The
    last rank joins last."""
    rank = hvd.rank()
    size = hvd.size()
    for batch in range(rank + 1):
        ranks = list(range(batch, size))
        yield (
            hvd.allreduce(given((4,), rank, "float32"), op=hvd.Sum, name=f"batch {batch}"),
            (reduced((4,), ranks, "float32", "Sum"), "float32"),
        )
    yield np.array([hvd.join()]), (np.array([size - 1]), "int64")


def join_average(hvd: Any) -> Claims:
    """Averages are divided by the ranks that still take part."""
    rank = hvd.rank()
    size = hvd.size()
    for batch in range(rank + 1):
        expected = reduced((4,), list(range(batch, size)), "float32", "Average")
        yield (
            hvd.allreduce(given((4,), rank, "float32"), op=hvd.Average, name=f"mean {batch}"),
            (expected, "float32"),
        )
    hvd.join()


def join_under_way(hvd: Any) -> Claims:
    """What a rank asked for before it joined counts in an average; what it did not ask for changes
    no Min, Product or sparse average."""
    rank = hvd.rank()
    size = hvd.size()
    is_last = rank == size - 1
    begun = hvd.allreduce_async(torch.full((3,), 1.0 + rank), name="begun", op=hvd.Average)
    if is_last:
        one = torch.full((2,), 3.0)
        yield (
            hvd.allreduce(one, name="least", op=hvd.Min, prescale_factor=-1.0),
            (np.full(2, -3.0), "float32"),
        )
        yield (
            hvd.allreduce(
                torch.full((900,), 3.0), name="product", op=hvd.Product, prescale_factor=0.5
            ),
            (np.full(900, 1.5), "float32"),
        )
        rows = torch.full((size,), 3.0)
        yield (
            hvd.reducescatter(rows, name="rows", op=hvd.Product, prescale_factor=0.5),
            (np.full(1, 1.5), "float32"),
        )
        yield hvd.broadcast(torch.full((2,), 7.0), rank, name="sent"), (np.full(2, 7.0), "float32")
        sparse = hvd.sparse_allreduce_async(
            torch.tensor([0.0, 4.0]).to_sparse(), name="sparse", op=hvd.Average
        )
        yield sparse().to_dense(), (np.array([0.0, 4.0]), "float32")
    hvd.join()
    yield hvd.synchronize(begun), (np.full(3, (size + 1) / 2), "float32")


def join_unnamed(hvd: Any) -> Claims:
    """Unnamed calls continue to work although ranks have made different numbers of them."""
    rank = hvd.rank()
    size = hvd.size()
    for batch in range(rank + 1):
        yield (
            hvd.allreduce(given((4,), rank, "float32"), op=hvd.Sum),
            (reduced((4,), list(range(batch, size)), "float32", "Sum"), "float32"),
        )
    hvd.join()
    yield (
        hvd.allreduce(given((4,), rank, "float32"), op=hvd.Sum),
        (reduced((4,), list(range(size)), "float32", "Sum"), "float32"),
    )


def objects(hvd: Any) -> Claims:
    rank = hvd.rank()
    size = hvd.size()
    things = [
        {"rank": r, 5: [1.5, None, (True, "x" * 300 * r)], "array": np.arange(r)}
        for r in range(size)
    ]
    for root in range(size):
        yield (
            np.array([str(hvd.broadcast_object(things[rank], root)) == str(things[root])]),
            (np.ones(1), "bool"),
        )
    yield np.array([str(hvd.allgather_object(things[rank])) == str(things)]), (np.ones(1), "bool")
    found = hvd.broadcast_object({"w": torch.arange(3.0) + rank}, size - 1)["w"]
    yield found, (np.arange(3.0) + size - 1, "float32")


def polled(hvd: Any) -> Claims:
    """poll() alone makes progress."""
    for turn in range(5):
        handle = hvd.allreduce_async(
            given((6,), hvd.rank(), "float64"), op=hvd.Sum, name=f"polled {turn}"
        )
        while not hvd.poll(handle):
            pass
        yield (
            hvd.synchronize(handle),
            (reduced((6,), list(range(hvd.size())), "float64", "Sum"), "float64"),
        )


def adasum(dtype: str, hvd: Any) -> Claims:
    """By the formula, pair by pair; 4 ranks: pairs of pairs."""
    rank = hvd.rank()
    size = hvd.size()
    for length in (1, 2, 37):
        vectors = [np.sin(np.arange(1.0, length + 1) * (r + 1)) for r in range(size)]
        found = hvd.allreduce(
            torch.tensor(vectors[rank], dtype=getattr(torch, dtype)),
            op=hvd.Adasum,
            name=f"adasum {length}",
        )
        while len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [
                (1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b for a, b in pairs
            ]
        yield found, (vectors[0], dtype)


def compression(hvd: Any) -> Claims:
    x = given((8,), hvd.rank(), "float32")
    expected = reduced((8,), list(range(hvd.size())), "float32", "Sum")
    for kind in (hvd.Compression.none, hvd.Compression.fp16):
        yield hvd.allreduce(x, op=hvd.Sum, compression=kind), (expected, "float32")


def sparse(hvd: Any) -> Claims:
    rank = hvd.rank()
    size = hvd.size()
    x = torch.sparse_coo_tensor(
        torch.tensor([[rank, size]]),
        torch.tensor([1.0 + rank, 10.0]),
        (size + 1,),
        check_invariants=True,
    ).coalesce()
    expected = np.array([*(r + 1.0 for r in range(size)), 10.0 * size])
    yield (
        hvd.sparse_allreduce_async(x, name="sparse", op=hvd.Sum)().to_dense(),
        (expected, "float32"),
    )
    yield (
        hvd.sparse_allreduce_async(x, name="sparse", op=hvd.Average)().to_dense(),
        (expected / size, "float32"),
    )


def mismatches(hvd: Any) -> Claims:
    """Each is an error on every rank, and the next collective works."""
    rank = hvd.rank()
    size = hvd.size()
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(torch.ones(3 + (rank == size - 1)), name="shape"),
        lambda: hvd.allreduce(
            torch.ones(3, dtype=torch.float32 if rank else torch.float64), name="dtype"
        ),
        lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum if rank else hvd.Average, name="op"),
        lambda: hvd.broadcast(torch.ones(3), min(rank, 1), name="root"),
        lambda: hvd.allgather(torch.ones(2, 2 + (rank == 0)), name="columns"),
    ]
    for call in calls:
        try:
            call()
            raised = size == 1
        except hvd.HorovodInternalError:
            raised = True
        yield np.array([raised]), (np.ones(1), "bool")
        yield hvd.allreduce(torch.ones(2), op=hvd.Sum), (np.full(2, size), "float32")


def refusals(hvd: Any) -> Claims:
    """ValueError on the rank itself, which no other rank needs to see."""
    calls: list[Callable[[], Any]] = [
        lambda: hvd.broadcast(torch.ones(3), hvd.size() + 3, name="bad root"),
        lambda: hvd.allreduce(torch.ones(3), average=True, op=hvd.Sum),
        lambda: hvd.alltoall(torch.ones(hvd.size() + 1)) if hvd.size() > 1 else hvd.poll(987654),
        lambda: hvd.poll(987654),
        lambda: hvd.reducescatter(torch.tensor(1.0)),
    ]
    for call in calls:
        try:
            call()
            raised = False
        except ValueError:
            raised = True
        yield np.array([raised]), (np.ones(1), "bool")
    try:
        hvd.reducescatter(torch.ones(hvd.size()), op=hvd.Adasum)
        raised = False
    except RuntimeError:  # of Horovod a HorovodInternalError
        raised = True
    yield np.array([raised]), (np.ones(1), "bool")
    handle = hvd.allreduce_async(torch.ones(1))
    hvd.synchronize(handle)
    yield (
        np.array([hvd.synchronize(handle) is None, hvd.synchronize(123456) is None]),
        (np.ones(2), "bool"),
    )


def same_name_twice(hvd: Any) -> Claims:
    """ValueError while the first one is under way: each rank tries it before the others begin that
    call."""
    for tries in range(hvd.size()):
        name = f"twice.{tries}"
        raised = True
        first = None
        if hvd.rank() == tries:
            first = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name=name)
            try:
                hvd.synchronize(hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name=name))
                raised = False
            except ValueError:
                pass
        hvd.allreduce(torch.ones(1), name=f"after.{name}")
        hvd.synchronize(
            hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name=name) if first is None else first
        )
        yield np.array([raised]), (np.ones(1), "bool")


def places(hvd: Any) -> Claims:
    """All on one host; local ranks in any order."""
    size = hvd.size()
    found = [
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
        hvd.is_initialized(),
        hvd.global_process_set.size(),
    ]
    yield np.array(found), (np.array([size, 0, 1, True, size]), "int64")
    yield np.sort(wide(hvd.allgather(torch.tensor([hvd.local_rank()])))), (np.arange(size), "int64")


def layouts(hvd: Any) -> Claims:
    """Tensors that are not contiguous, channels_last among them; arrays of NumPy."""
    rank = hvd.rank()
    ranks = list(range(hvd.size()))
    shape = (2, 3, 4, 5)
    x = given(shape, rank, "float32")
    for tensor in (
        x.to(memory_format=torch.channels_last),
        x.transpose(1, 3).contiguous().transpose(1, 3),
    ):
        yield (
            hvd.allreduce(tensor, op=hvd.Sum),
            (reduced(shape, ranks, "float32", "Sum"), "float32"),
        )
        in_place = tensor.clone()
        hvd.allreduce_(in_place, op=hvd.Sum)
        yield in_place, (reduced(shape, ranks, "float32", "Sum"), "float32")
        yield hvd.broadcast(tensor, 0), (wide(given(shape, 0, "float32")), "float32")
    array = x.cpu().numpy()
    found = hvd.allreduce(array, op=hvd.Sum)
    assert isinstance(found, np.ndarray), type(found)
    yield found, (reduced(shape, ranks, "float32", "Sum"), "float32")
    yield (
        hvd.allgather(array),
        (np.concatenate(parts_of(ranks, lambda r: 2, (3, 4, 5), "float32")), "float32"),
    )


CHECKS: dict[str, Check] = {
    **{
        f"allreduce-{op}-{d}": (lambda hvd, d=d, op=op: allreduce(d, op, hvd))
        for d in REDUCED + MORE_REDUCED
        for op in OPS
    },
    **{f"factors-{d}": (lambda hvd, d=d: factors(d, hvd)) for d in REDUCED},
    **{f"allgather-{d}": (lambda hvd, d=d: allgather(d, hvd)) for d in MOVED + MORE_MOVED},
    **{f"broadcast-{d}": (lambda hvd, d=d: broadcast(d, hvd)) for d in MOVED + MORE_MOVED},
    **{f"alltoall-{d}": (lambda hvd, d=d: alltoall(d, hvd)) for d in MOVED + MORE_MOVED},
    **{
        f"reducescatter-{op}-{d}": (lambda hvd, d=d, op=op: reducescatter(d, op, hvd))
        for d in REDUCED
        for op in ("Average", "Sum")
    },
    **{f"adasum-{d}": (lambda hvd, d=d: adasum(d, hvd)) for d in ("float32", "float64")},
    **{
        f.__name__: f
        for f in (
            many,
            large,
            gradients,
            gradients_twice,
            gradients_of_extremes,
            process_sets,
            objects,
            polled,
            compression,
            sparse,
        )
    },
    **{
        f.__name__: f
        for f in (
            mismatches,
            refusals,
            same_name_twice,
            places,
            layouts,
            join,
            join_average,
            join_under_way,
            join_unnamed,
        )
    },
}
NO_ORDER = [f"allreduce-{op}-{d}" for d in ("complex64", "complex128") for op in ("Min", "Max")]
for name in (*NO_ORDER, "allreduce-Average-bool"):
    del CHECKS[name]


def judge(found: Any, expected: np.ndarray, dtype: str | None) -> None:
    if dtype is None:
        return
    array = wide(found) if isinstance(found, torch.Tensor) else np.asarray(found)
    if isinstance(found, torch.Tensor):
        assert str(found.dtype) == f"torch.{dtype}", f"{found.dtype}, not {dtype}"
    assert array.shape == expected.shape, f"shape {array.shape}, not {expected.shape}"
    near = np.isclose(array, expected, rtol=TOLERANCE.get(dtype, 0), atol=TOLERANCE.get(dtype, 0))
    assert near.all(), (
        f"{array.ravel()[~near.ravel()][:3]}, not {expected.ravel()[~near.ravel()][:3]}"
    )


def failure_of(hvd: Any, check: Check) -> str:
    """All of a check's collectives are made before its claims are judged."""
    try:
        claims = list(check(hvd))
        for found, (expected, dtype) in claims:
            judge(found, expected, dtype)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    module = sys.argv[1]
    out = Path(sys.argv[2])
    skipped = set(sys.argv[3].split(",")) if len(sys.argv) > 3 else set()
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    if device := os.environ.get("HVDTRAIN_TEST_DEVICE"):
        torch.set_default_device(device)
    hvd = importlib.import_module(module)
    hvd.init()
    failures = {}
    for name, check in CHECKS.items():
        if name in skipped:
            continue
        failures[name] = failure_of(hvd, check)
        if os.environ.get("SHOW"):
            print(hvd.rank(), name, failures[name], flush=True)
    for rank, other in enumerate(hvd.allgather_object(failures)):
        for name, failure in other.items():
            failures[name] = failures[name] or (f"rank {rank}: {failure}" if failure else "")
    if hvd.rank() == 0:
        out.write_text(json.dumps(failures))


if __name__ == "__main__":
    main()
