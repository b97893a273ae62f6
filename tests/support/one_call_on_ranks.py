"""Reductions to owners and gathers: with Gloo as NCCL makes them, while calls that go rank by rank
raise; and the calls that MPI uses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from conformance import allgather, expect, reduce_scatter, sharded
from strategies_on_ranks import learner, train, weights

from hvdtrain.comm import torch_groups
from hvdtrain.comm.communicator import part_of
from hvdtrain.horovod.engine.reduce import scattered_sums


def conforms(communicator: Any) -> int:
    """How many results are as expected."""
    right = 0
    with _in_one_call(communicator):
        for check, dtype in product(
            (sharded, reduce_scatter, allgather), ("int16", "uint8", "float32")
        ):
            for claim in check(dtype, "torch", communicator, f"{check.__name__} {dtype}"):
                expect(*claim)
                right += 1
    return right


def farthest_weight(communicator: Any, stage: int) -> float:
    """From stage 0, relative to the largest, after three steps of SGD; of the two buckets one does
    not split evenly over 2 or 3 ranks."""
    words = ("optim.name=sgd", "speed.precision=fp64", "comm.bucket_mb=0.01")
    sizes = [5 + 3 * rank for rank in range(communicator.size)]
    whole, parts = (
        learner(communicator, *words),
        learner(communicator, f"shard.stage={stage}", *words),
    )
    train(whole, communicator, 3, sizes)
    with _in_one_call(communicator):
        train(parts, communicator, 3, sizes)
    expected = weights(whole.state())
    found = weights(parts.state())
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def calls_of_mpi(communicator: Any, numbers: int) -> tuple[list[str], float]:
    """By which calls of MPI float64 numbers are reduced to their owners and spread again; the
    relative error of the sums."""
    random = np.random.default_rng(0).standard_normal((communicator.size, numbers))
    x = random[communicator.rank].copy()
    own = part_of(numbers, communicator.rank, communicator.size)
    calls_of = communicator._calls
    comm = calls_of._comm
    calls_of._comm = mock.Mock(wraps=comm)
    try:
        part = communicator.start_reduce_scatter(x, f"{numbers} reduced").wait().copy()
        whole = np.zeros(numbers)
        whole[own] = part
        communicator.start_spread(whole, f"{numbers} spread").wait()
        calls = [call[0] for call in calls_of._comm.mock_calls]
    finally:
        calls_of._comm = comm
    expected = random.sum(0)
    return calls, float(np.abs(whole - expected).max() / np.abs(expected).max())


def scattered(communicator: Any) -> tuple[int, str]:
    """Reduces five tensors to the ranks' rows of the sums. Returns the number of
    torch.distributed's reduce-scatters, and what is wrong with the rows."""
    size = communicator.size
    rank = communicator.rank
    shapes = [(2 * size, 3), (size + 1, 2), (size,), (1,), (3 * size, 1, 2)]
    wholes = [torch.arange(float(math.prod(shape))).view(shape) for shape in shapes]
    with (
        _in_one_call(communicator),
        mock.patch.object(
            torch_groups, "_reduce_scatter", wraps=torch_groups._reduce_scatter
        ) as calls,
    ):
        found = scattered_sums(communicator, [whole * (rank + 1) for whole in wholes], "rows")
    total = size * (size + 1) // 2
    for whole, rows in zip(wholes, found, strict=True):
        expected = whole[part_of(len(whole), rank, size)] * total
        if not torch.equal(rows, expected):
            return (
                calls.call_count,
                f"{tuple(whole.shape)}: {rows.tolist()}, not {expected.tolist()}",
            )
    return calls.call_count, ""


def on_gpu(communicator: Any) -> bool:
    """Whether sums and gathers of 1, 6 and 70,001 rows in a GPU's memory are as worked out here, by
    NCCL."""
    right = []
    for rows in (1, 6, 70_001):
        numbers = torch.arange(float(rows), device="cuda")
        own = part_of(rows, communicator.rank, communicator.size)
        with mock.patch.object(dist, "reduce", None):
            found = communicator.start_reduce_scatter(
                numbers * (communicator.rank + 1), f"{rows} reduced"
            ).wait()
        ranks = communicator.size * (communicator.size + 1) // 2
        right.append(found.is_cuda and torch.equal(found, (numbers * ranks)[own]))
        mine = torch.zeros_like(numbers)
        mine[own] = numbers[own]
        right.append(torch.equal(communicator.start_spread(mine, f"{rows} spread").wait(), numbers))
    return all(right)


@contextlib.contextmanager
def _in_one_call(communicator: Any) -> Iterator[None]:
    devices = communicator.in_one_call
    communicator.in_one_call = ("cpu",)
    raises = mock.Mock(side_effect=AssertionError("rank by rank"))
    try:
        with mock.patch.multiple(dist, reduce=raises, broadcast=raises, all_gather=raises):
            yield
    finally:
        communicator.in_one_call = devices
