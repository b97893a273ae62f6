"""The costs of a model's units: measured seconds of a forward and a backward pass, and
operations."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import fold
from hvdtrain.errors import UserError, first_line
from hvdtrain.extras.pipeline.cuts import operations_of, refuse_changed_buffers
from hvdtrain.extras.pipeline.keys import PipelineKeys
from hvdtrain.extras.pipeline.schedule import Seconds, UnitCost
from hvdtrain.extras.pipeline.stages import Autocast, Stage, units_of
from hvdtrain.frameworks.torch.buffers import copied_buffers
from hvdtrain.frameworks.torch.call import only_one
from hvdtrain.frameworks.torch.check_outputs import check_outputs, example
from hvdtrain.frameworks.torch.device import pick_device
from hvdtrain.frameworks.torch.model import normed_model
from hvdtrain.frameworks.torch.pipeline_unit import Unit
from hvdtrain.frameworks.torch.precision import pick_precision
from hvdtrain.frameworks.torch.private_api import tree_leaves
from hvdtrain.tasks.task import Task

# loads the weights of a unit, if they are not in memory
InMemory = Callable[[Unit], AbstractContextManager[None]]


def no_memory_needed(unit: Unit) -> AbstractContextManager[None]:
    """Implements InMemory for a model whose weights are in memory."""
    return nullcontext()


def unit_costs(config: Config, task: Task, samples: int) -> list[UnitCost]:
    """Measures the costs of the units of the job's model with `samples` samples, in this process.
    Raises UserError for a model that a pipeline does not support.

    Uses the number of threads that a rank has if all ranks of the model share this machine.
    """
    alone = SingleProcessCommunicator()
    threads = torch.get_num_threads()
    device = pick_device(config, alone)
    precision = pick_precision(config, device, alone)
    torch.manual_seed(fold(config.seed) & (2**63 - 1))
    model = normed_model(config, task, alone).to(device=device, dtype=precision.weights)
    like = torch.empty(0, dtype=precision.weights, device=device)
    check_outputs(model, config, task, like)
    where = config.where("parallel.pipeline")
    units = units_of(model, where)
    refuse_changed_buffers(model, only_one(example(2, config, task, like)), where)
    operations = operations_of(units, model, only_one(example(samples, config, task, like)), where)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, threads // config.parallel.ranks))
    try:
        seconds = own_seconds(
            units, only_one(example(samples, config, task, like)), precision.autocast
        )
    finally:
        torch.set_num_threads(threads)
    return [
        UnitCost(unit.name, flops, each)
        for unit, flops, each in zip(units, operations, seconds, strict=True)
    ]


def samples_of_pass(config: Config, pipelines: int) -> int:
    """Returns the largest micro-batch of the job's first step; config.batch.size is resolved."""
    share = -(-config.batch.size // pipelines)
    parallel = PipelineKeys.of(config)
    if isinstance(config.batch.micro, int):
        return min(share, config.batch.micro)
    return -(-share // (parallel.micro_batches or 2 * parallel.pipeline))


def agreed_seconds(
    units: Sequence[Unit],
    x: torch.Tensor,
    autocast: Autocast,
    communicator: Communicator,
    in_memory: InMemory = no_memory_needed,
) -> list[Seconds]:
    """Returns own_seconds() of rank 0 on all ranks, or raises its UserError. A collective."""

    def own() -> list[tuple[float, ...]]:
        return [tuple(each) for each in own_seconds(units, x, autocast, in_memory)]

    return [Seconds(*each) for each in on_rank_0(communicator, own)]


def own_seconds(
    units: Sequence[Unit],
    x: torch.Tensor,
    autocast: Autocast,
    in_memory: InMemory = no_memory_needed,
) -> list[Seconds]:
    """Measures seconds of a forward and a backward pass of x, (n, ...), in training mode. Raises
    UserError for a unit that fails."""
    Stage(units).train()
    calls = [unit._replace(call=_in_precision(unit.call, autocast)) for unit in units]
    return measured_seconds(calls, x, in_memory=in_memory)


def _in_precision(
    call: Callable[[torch.Tensor], Any], autocast: Autocast
) -> Callable[[torch.Tensor], Any]:
    def called(x: torch.Tensor) -> Any:
        with autocast(x.device):
            return call(x)

    return called


def measured_seconds(
    units: Sequence[Unit],
    x: torch.Tensor,
    repeats: int = 5,
    in_memory: InMemory = no_memory_needed,
) -> list[Seconds]:
    """Measures seconds of a forward and a backward pass of one micro-batch in each unit: the
    fastest of `repeats`, after a warm-up.

    x: (n, ...), inputs of the first unit. in_memory: the context in which a unit is measured.
    Gradients, buffers and torch's generators are restored. Raises UserError for a unit that fails.
    """
    timed = []
    with torch.random.fork_rng(), copied_buffers(Stage(units)):
        for unit in units:
            try:
                with in_memory(unit):
                    passes = [_one_pass(unit, x) for _ in range(repeats + 1)]
            except Exception as error:  # an error in the user's model
                what = (
                    f"unit {unit.name} failed while it was timed: {type(error).__name__}: "
                    f"{first_line(error)}"
                )
                raise UserError(
                    what,
                    "parallel.balance",
                    "units that can be trained separately; or parallel.balance=operations",
                ) from error
            measured = [seconds for seconds, _ in passes[1:]]
            timed.append(
                Seconds(
                    min(each.forward for each in measured), min(each.backward for each in measured)
                )
            )
            x = passes[-1][1]
    return timed


def _one_pass(unit: Unit, x: torch.Tensor) -> tuple[Seconds, Any]:
    """Returns the seconds of one pass, and the outputs."""
    leaf = x.detach().requires_grad_(x.is_floating_point())
    # a copy, because a unit may work in place, like nn.ReLU(inplace=True), which a leaf and the
    # next pass do not allow
    x = leaf.clone()
    start = _now(x)
    outputs = unit.call(x)
    middle = _now(x)
    inputs = [p for p in (leaf, *Stage([unit]).parameters()) if p.requires_grad]
    differentiable = [
        y for y in tree_leaves(outputs) if isinstance(y, torch.Tensor) and y.requires_grad
    ]
    if inputs and differentiable:
        torch.autograd.grad(
            differentiable, inputs, [torch.ones_like(y) for y in differentiable], allow_unused=True
        )
    return Seconds(middle - start, _now(x) - middle), outputs


def _now(x: torch.Tensor) -> float:
    """Returns the time in seconds after the device has finished."""
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
    return time.perf_counter()
