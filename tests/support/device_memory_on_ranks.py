"""Collectives of MPI of tensors on GPUs, by both ways of comm.device_memory: of a stand-in for a
GPU, and of a real one."""

from __future__ import annotations

import math
import time
from typing import Any

import conformance
import numpy as np
import torch
from late_gpu import HOST, LateGpu
from strategies_on_ranks import learner, train, weights

from hvdtrain.comm.communicator import part_of
from hvdtrain.comm.device_memory import Way
from hvdtrain.comm.mpi import Device, MpiCommunicator
from hvdtrain.comm.staging import Accelerator
from hvdtrain.errors import UserError

CYCLES = 400_000_000  # about 200 ms, during which the tensor to reduce is not ready


def failures(ranks: MpiCommunicator, way: Way) -> tuple[int, dict[str, str]]:
    """Returns how many of the checks for every engine use tensors, and the failed checks."""
    group = _group(ranks, LateGpu(), way)
    checks = {
        name: check
        for name, check in conformance.checks_of("mpi").items()
        if name.endswith("-torch")
    }
    found = {}
    for name, check in checks.items():
        try:
            for claim in list(check(group, name.removesuffix("-torch"))):
                conformance.expect(*claim)
        except Exception as error:
            found[name] = f"rank {group.rank} of {group.size}: {type(error).__name__}: {error}"
    ranks.free_group(group)
    return len(checks), found


def late(ranks: MpiCommunicator, way: Way) -> list[str]:
    """Runs collectives of a tensor that the GPU fills as late as possible. Returns the names of
    collectives with a wrong result."""
    gpus = LateGpu()
    group = _group(ranks, gpus, way)
    size = group.size
    rank = group.rank
    wrong = []
    total = size * (size + 1) / 2
    for name, start, expected in (
        ("allreduce", lambda x: group.start_allreduce(x, "late"), [total] * (2 * size)),
        (
            "broadcast",
            lambda x: group.start_broadcast(x, "late", size - 1),
            [float(size)] * (2 * size),
        ),
        ("reduce_scatter", lambda x: group.start_reduce_scatter(x, "late"), [total] * 2),
        (
            "spread",
            lambda x: group.start_spread(x, "late"),
            [1.0 + r for r in range(size) for _ in range(2)],
        ),
        ("16 bits", lambda x: group.start_allreduce(x, "late"), [total] * (2 * size)),
    ):
        x = torch.full(
            (2 * size,), math.nan, dtype=torch.float16 if name == "16 bits" else torch.float32
        )
        gpus.present(HOST).give(lambda x=x: x.fill_(rank + 1.0))
        found = start(x).wait().tolist()
        if found != expected:
            wrong.append(f"{name}: {found}")
    for name, make, expected in (
        (
            "blocking allreduce",
            lambda x: group.allreduce(x, "late", "max"),
            [float(size)] * (2 * size),
        ),
        (
            "allgather",
            lambda x: group.allgather(x, "late"),
            [1.0 + r for r in range(size) for _ in range(2 * size)],
        ),
        ("blocking reduce_scatter", lambda x: group.reduce_scatter(x, "late"), [total] * 2),
    ):
        x = torch.full((2 * size,), math.nan)
        gpus.present(HOST).give(lambda x=x: x.fill_(rank + 1.0))
        if make(x).tolist() != expected:
            wrong.append(name)
    ranks.free_group(group)
    return wrong


def asked(
    ranks: MpiCommunicator, wish: str, on_gpu: list[bool]
) -> tuple[str, list[str], list[str], bool]:
    """What use_gpus() raises, its notes, which features it adds, and whether groups that were made
    before and after have them."""
    group = ranks.split(0)
    assert isinstance(group, MpiCommunicator)
    before = group.split(0)
    former = set(group.features)
    error = ""
    try:
        group.use_gpus(LateGpu() if on_gpu[group.rank] else None, wish, "a test")  # type: ignore[arg-type]
    except UserError as raised:
        error = raised.what
    after = group.split(0)
    assert before is not None and after is not None
    alike = before.features == group.features == after.features
    for each in (before, after):
        group.free_group(each)  # type: ignore[arg-type]
    ranks.free_group(group)
    return error, list(group.notes), sorted(set(group.features) - former), alike


def mixed(ranks: MpiCommunicator) -> list[float]:
    """Returns a sum over ranks; only the first computes on a GPU."""
    gpus = LateGpu()
    group = ranks.split(0)
    assert isinstance(group, MpiCommunicator)
    group.use_gpus(gpus if group.rank == 0 else None, "auto", "a test")
    x = torch.full((3,), group.rank + 1.0)
    found: list[float] = (
        group.start_allreduce(x.clone(), "mixed").wait().tolist()
        + group.allreduce(x, "mixed").tolist()
    )
    ranks.free_group(group)
    return found


def farthest_weight(ranks: MpiCommunicator, way: Way, stage: int) -> tuple[str, float]:
    """Makes three steps of SGD on the stand-in's tensors. Returns the description of the strategy,
    and the distance of the weights from those computed in host memory."""
    words = (
        f"shard.stage={stage}",
        "optim.name=sgd",
        "speed.precision=fp64",
        "comm.bucket_mb=0.01",
    )
    sizes = [5 + 3 * rank for rank in range(ranks.size)]
    group = _group(ranks, LateGpu(), way)
    plain, moved = learner(ranks, *words), learner(group, *words)
    for made, communicator in ((plain, ranks), (moved, group)):
        train(made, communicator, 3, sizes)
    expected = weights(plain.state())
    found = weights(moved.state())
    ranks.free_group(group)
    return moved.strategy.summary, float(np.abs(found - expected).max() / np.abs(expected).max())


def on_gpu(ranks: MpiCommunicator) -> tuple[list[str], bool, str]:
    """Sums a tensor that is filled late. Returns the notes, whether the host continued before the
    tensor was filled, and what is wrong with the sums."""
    torch.cuda.set_device(0)
    group = ranks.split(0)
    assert isinstance(group, MpiCommunicator)
    group.use_gpus(Accelerator("cuda"), "auto", "a test")
    size = ranks.size
    wrong = ""
    went_on = []
    side = torch.cuda.Stream()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for length in (size, 2_000_000):
            with torch.cuda.stream(side):
                x = torch.full((length,), math.nan, device="cuda", dtype=dtype)
                torch.cuda._sleep(CYCLES)
                x.copy_(torch.full_like(x, ranks.rank + 1))
                own = x.clone()
                began_s = time.monotonic()
                handle = group.start_allreduce(x, "sum")
                filled = side.record_event()
                went_on.append(time.monotonic() - began_s < 0.05 or not filled.query())
                del x
                found = handle.wait().double().sum()
                spread = group.start_spread(own, "spread").wait().double().sum()
            side.synchronize()
            expected = size * (size + 1) / 2 * length
            parts = sum(
                (rank + 1) * len(range(length)[part_of(length, rank, size)]) for rank in range(size)
            )
            if (float(found), float(spread)) != (expected, parts):
                wrong = (
                    wrong
                    or f"{dtype}, {length}: {float(found)}, {float(spread)}, not {expected}, "
                    f"{parts}"
                )
    notes = list(group.notes)
    ranks.free_group(group)
    return notes, all(went_on), wrong


def _group(ranks: MpiCommunicator, gpus: LateGpu, way: Way) -> Any:
    group = ranks.split(0)
    assert isinstance(group, MpiCommunicator)
    group._take_devices(Device(gpus, way))
    return group
