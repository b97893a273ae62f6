"""Scripts with Horovod's API, on the CPU or on the GPU of this rank: a training loop, and all of
its calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from horovod_checks import CHECKS, failure_of
from torch import nn

import hvdtrain.horovod as hvd
from hvdtrain.comm.communicator import Communicator
from hvdtrain.horovod.engine.own import OwnEngine
from hvdtrain.horovod.engine.settings import settings_of
from hvdtrain.horovod.job import JOB

STEPS = 6
SAMPLES = 12  # of a step, over all ranks
WAYS: dict[str, dict[str, Any]] = {
    "optimizer": {},
    # with synchronized norms
    "groups": {"groups": 2, "backward_passes_per_step": 2},
}
# dtypes that take different paths: the others take one of theirs
SOME = ("float64", "int64", "complex64")
LEFT_OUT = (
    *("sparse", "join_under_way"),  # the simulated GPU has no sparse tensors
    # wrong calls, and ranks that come late: the device changes nothing, and they take seconds
    *("mismatches", "refusals", "same_name_twice", "places", "join", "join_unnamed", "polled"),
)


@contextmanager
def initialized(communicator: Communicator, device: torch.device) -> Iterator[None]:
    """Inside, hvd.init() has connected these ranks, which are connected already."""
    JOB._idle = OwnEngine(communicator, settings_of(os.environ))
    hvd.init()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        yield
        hvd.shutdown()
    finally:
        JOB._idle = None


def trained(
    way: str, device: torch.device, watch: Callable[[Callable[[], Any]], Any]
) -> dict[str, Any]:
    """watch: calls each step."""
    torch.manual_seed(hvd.rank())  # another model on each rank: that of rank 0 counts
    norm = hvd.SyncBatchNorm if way == "groups" else nn.Identity
    model = nn.Sequential(nn.Linear(6, 16), norm(16), nn.Tanh(), nn.Linear(16, 3))
    model = model.double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    options = WAYS[way]
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), **options
    )
    passes = options.get("backward_passes_per_step", 1)
    generator = torch.Generator().manual_seed(1)
    own = slice(hvd.rank(), None, hvd.size())
    x, y = (
        torch.randn(STEPS, SAMPLES, width, generator=generator, dtype=torch.float64)[:, own]
        .contiguous()
        .to(device)
        for width in (6, 3)
    )

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for inputs, targets in zip(x[number].chunk(passes), y[number].chunk(passes), strict=True):
            loss = nn.functional.mse_loss(model(inputs), targets) / passes
            loss.backward()
            total += loss.detach()
        optimizer.step()
        mean: torch.Tensor = hvd.allreduce(total, name="loss")
        return mean

    losses = [watch(partial(step, number)) for number in range(STEPS)]
    with torch.no_grad():
        outputs = hvd.allgather(model.eval()(x[0]))
    return {
        "losses": [float(loss) for loss in losses],
        "val": {"outputs": float(outputs.square().sum())},
    }


def called(device: torch.device) -> dict[str, Any]:
    """Makes all calls with tensors of the device: as a loss, 1 of each kind that gives what it
    should."""
    torch.set_default_device(device)
    try:
        failures = {name: failure_of(hvd, CHECKS[name]) for name in CHECKS if _is_tried(name)}
    finally:
        torch.set_default_device(None)
    return {
        "losses": [float(not failure) for failure in failures.values()],
        "val": {},
        "failures": {name: failure for name, failure in failures.items() if failure},
    }


def _is_tried(name: str) -> bool:
    """Whether a check is one of those whose path differs: each operation with one dtype, and sums
    and movers with all of SOME."""
    if name in LEFT_OUT:
        return False
    *kind, dtype = name.split("-")
    if not kind or dtype == SOME[0]:
        return True
    return dtype in SOME and ("Sum" in kind or len(kind) == 1)
