"""The torch framework: builds a rank's learner from the configuration."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any, cast

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.driver_files import HERE
from hvdtrain.comm.engines import Feature
from hvdtrain.comm.mesh import make_mesh
from hvdtrain.comm.staging import KINDS, Accelerator
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementation
from hvdtrain.core.progress import fold
from hvdtrain.errors import UserError
from hvdtrain.frameworks.by_name import is_made_with_the_model, makes_groups
from hvdtrain.frameworks.footprint import Footprint, PlannedStep
from hvdtrain.frameworks.learner import Learner, fair_threads
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.torch.arrangement import Making
from hvdtrain.frameworks.torch.arrangements import arrangement_of, load_classes
from hvdtrain.frameworks.torch.assemble import assemble, make_optimizer
from hvdtrain.frameworks.torch.check_outputs import check_outputs
from hvdtrain.frameworks.torch.device import (
    all_on_gpus,
    check_compiler,
    check_shared,
    keep_freed_memory,
    pick_device,
    return_large_memory,
)
from hvdtrain.frameworks.torch.foreign.downloads import download_first
from hvdtrain.frameworks.torch.frozen import frozen_names
from hvdtrain.frameworks.torch.model import build_model, check_first_samples, checked_model
from hvdtrain.frameworks.torch.optim.user_optimizer import check_elementwise
from hvdtrain.frameworks.torch.precision import pick_precision, refuse_tiny_images
from hvdtrain.frameworks.torch.step_costs import stopwatch_for
from hvdtrain.tasks.task import Task


def build(config: Config, task: Task, communicator: Communicator) -> Learner:
    """Builds the learner of framework=torch. Every rank calls it.

    Raises UserError if the device, model, optimizer or engine does not support the configuration.
    """
    device = device_of_rank(config, communicator)
    precision = pick_precision(config, device, communicator)
    check_compiler(config, device)
    if config.shard.stage or arrangement_of(config).divides:
        check_optimizer(config)
    stopwatch = ReplaceableStopwatch(stopwatch_for(device))
    making = Making(
        config,
        task,
        make_mesh(communicator, config),
        device,
        precision,
        stopwatch,
        hashes_on_device=all_on_gpus(device, communicator),
    )
    download_first(config, communicator, lambda: build_model(config, task))
    torch.manual_seed(fold(config.seed) & (2**63 - 1))
    arrangement = arrangement_of(config)(making)
    check_outputs(arrangement.model, config, task, making.like)
    check_first_samples(arrangement.model, config)
    refuse_tiny_images(
        arrangement.model, making.example(), precision, config.where("speed.precision")
    )
    not_used: list[str] = []
    if plugins.is_dotted(config.model.name):
        from hvdtrain.frameworks.torch.not_used import lines_of_not_used

        not_used = lines_of_not_used(arrangement.model, config, task, making.like)
    arrangement.cut()
    learner = assemble(arrangement)
    learner.notes += not_used
    for module in arrangement.model.modules():
        learner.notes += getattr(module, "lines_of_padding", ())
    return learner


def device_of_rank(config: Config, communicator: Communicator) -> torch.device:
    """Returns this rank's device, and configures its threads and memory. Every rank calls it.

    Raises UserError if the device does not exist, or if NCCL would have to reduce for two ranks on
    one device.
    """
    threads = fair_threads(communicator)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    device = pick_device(config, communicator)
    check_shared(device, communicator, config.where("speed.device"))
    if "plain_mpi" in communicator.features:
        gpus = next((Accelerator(kind) for kind in KINDS if kind == device.type), None)
        cast(Any, communicator).use_gpus(
            gpus, config.comm.device_memory, config.where("comm.device_memory")
        )
    if device.type == "cpu":
        return_large_memory() if config.shard.stage == 3 else keep_freed_memory()
    return device


def check_device(config: Config, communicator: Communicator) -> None:
    """Raises UserError if this rank's device does not exist."""
    pick_device(config, communicator)


def load_libraries(config: Config) -> None:
    """Imports the libraries that build() and the first steps import. With recomputation, stage 3 or
    parallel.* they take some 70 MB; no tensors of the job are allocated."""
    if config.model.recompute != "none" or config.shard.stage == 3:
        import torch._dynamo  # noqa: F401  # torch.utils.checkpoint imports it when it is first called, and fully_shard()
    load_classes(config)


def check_optimizer(config: Config) -> None:
    """Raises UserError if build() would reject the optimizer of optim.name for any model.

    A function that makes parameter groups of a model is only called by build().
    """
    if is_made_with_the_model(config) and makes_groups(plugins.own_function(config.optim)):
        return
    optimizer = make_optimizer(config, [("weight", torch.nn.Parameter(torch.zeros(2, 2)))])
    if config.shard.stage or config.parallel.cuts:
        check_elementwise(optimizer, config.optim.name, config.where("optim.name"))


def footprint(
    config: Config, task: Task, step: PlannedStep, ranks: int, features: frozenset[Feature]
) -> Footprint:
    """Predicts the memory of the rank that uses most. Raises UserError if the model needs values to
    compute shapes, and if the arrangement is not supported.
    """
    arrangement_of(config).check_predictable(config)
    module = implementation("batch.micro=auto")
    if module is None:
        what = "this copy of hvdtrain has no extra that predicts the memory of a job"
        fix = "batch.micro=N instead of auto; `hvdtrain extras` lists the installed extras"
        raise UserError(what, config.where("batch.micro"), fix)
    # tensors without numbers: commands that predict nothing do not load them
    found: Footprint = importlib.import_module(module).predict(config, task, step, ranks, features)
    return found


def time_of_passes(
    config: Config,
    micro: int,
    seconds: Sequence[tuple[float, float]],
    transfers: Sequence[float],
) -> tuple[float, float]:
    """Returns Arrangement.time_of_passes() of the job."""
    return arrangement_of(config).time_of_passes(config, micro, seconds, transfers)


def gpu_address(config: Config, communicator: Communicator) -> str | None:
    """Returns the PCI address of this rank's GPU, as in /sys; None on the CPU, and if it is
    unknown."""
    device = pick_device(config, communicator)
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain = properties.pci_domain_id
        bus = properties.pci_bus_id
        slot = properties.pci_device_id
    except AttributeError:  # older torch
        return HERE.address_of(communicator.local_rank, os.environ)
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def free_device_bytes(config: Config, communicator: Communicator) -> int | None:
    """Returns the free bytes of this rank's GPU, divided by the ranks that share it; None on the
    CPU."""
    device = pick_device(config, communicator)
    if device.type == "cpu":
        return None
    gpus = torch.get_device_module(device)
    sharers = -(-communicator.local_size // gpus.device_count())
    return int(gpus.mem_get_info(device)[0]) // sharers


def has_dense_part(config: Config, task: Task) -> bool:
    """Whether the model names its dense part."""
    return isinstance(getattr(_model_without_memory(config, task), "dense_part", None), str)


def shapes(config: Config, task: Task) -> dict[str, tuple[int, ...]]:
    """Returns the trained parameters by name, as created by build(), without allocating or
    computing them, unless the model reads its values."""
    return {
        name: tuple(p.shape)
        for name, p in _model_without_memory(config, task).named_parameters()
        if p.requires_grad
    }


def frozen(config: Config, task: Task) -> list[str]:
    """Returns the names of the parameters that shapes() excludes."""
    return frozen_names(_model_without_memory(config, task))


def _model_without_memory(config: Config, task: Task) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            return checked_model(config, task)
    except UserError:
        raise
    except Exception:  # a meta tensor has no values to read; any other error is raised again later
        return checked_model(config, task)
