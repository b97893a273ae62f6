"""The JAX framework: builds a rank's learner; checks what JAX does not support, and picks the
devices of a rank."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.driver_files import HERE, DriverFiles
from hvdtrain.config.schema import Config
from hvdtrain.core.ties import Ties
from hvdtrain.errors import UserError
from hvdtrain.frameworks.by_name import check_patterns
from hvdtrain.frameworks.jax.start import start_jax
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.task import Task


def build(config: Config, task: Task, communicator: Communicator) -> Learner:
    """Builds the learner of framework=jax."""
    jax = load_jax(config.where("framework"))
    start_jax(jax, config, communicator)
    from hvdtrain.frameworks.jax.learner import JaxLearner, make_optimizer
    from hvdtrain.frameworks.jax.model import JaxDevice, build_model

    first, *others = pick_devices(jax, config, communicator)
    target = JaxDevice(
        first, np.dtype("float64" if config.speed.precision == "fp64" else "float32"), tuple(others)
    )
    model = build_model(config, task, target, communicator)
    shapes = {name: p.shape for name, p in zip(model.names, model.start, strict=True)}
    ties = model.functions.ties
    notes = check_patterns(config, shapes, Ties({name: name for name in model.names} | dict(ties)))
    learner = JaxLearner(config, model, make_optimizer(config, model), task, communicator, target)
    learner.notes = (*learner.notes, *notes)
    return learner


def load_jax(where: str) -> Any:
    """Imports jax. Raises UserError if it is missing or too old."""
    fix = "pip install 'hvdtrain[jax]'"
    try:
        jax = importlib.import_module("jax")
    except ModuleNotFoundError as error:
        raise UserError(f"framework=jax needs jax: {error}", where, fix) from error
    if not hasattr(jax, "enable_x64"):
        raise UserError(
            f"framework=jax needs jax 0.8 or later; this is {jax.__version__}", where, fix
        )
    return jax


def pick_device(
    jax: Any, config: Config, communicator: Communicator, files: DriverFiles = HERE
) -> Any:
    """Returns the device for this rank's local rank among the devices that JAX prefers, or the CPU.

    Raises UserError if speed.device=cuda finds no GPU, and if speed.device=auto would train on the
    CPU because this jax does not see the host's GPUs.
    """
    devices = (
        jax.local_devices(backend="cpu") if config.speed.device == "cpu" else jax.local_devices()
    )
    if config.speed.device == "cuda" and devices[0].platform != "gpu":
        fix = "speed.device=cpu, or a jax built for this GPU: pip install 'jax[cuda12]'"
        raise UserError("no CUDA device is visible to jax", config.where("speed.device"), fix)
    if (
        devices[0].platform == "cpu"
        and config.speed.device == "auto"
        and not jax.config.jax_platforms
        and (hidden := files.hidden_nvidia(os.environ))
    ):
        raise UserError(
            f"this host has GPUs ({hidden}), but jax {jax.__version__} sees none",
            config.where("speed.device"),
            "speed.device=cpu to train on the CPU; to use them: pip install 'jax[cuda12]'",
        )
    return devices[communicator.local_rank % len(devices)]


def pick_devices(jax: Any, config: Config, communicator: Communicator) -> list[Any]:
    """Returns the speed.devices devices of this rank: each local rank has a part of JAX's default
    devices, or of the CPU's.

    Raises UserError if there are fewer.
    """
    wanted = config.speed.devices
    first = pick_device(jax, config, communicator)
    if wanted == 1:
        return [first]
    devices = jax.local_devices(backend=first.platform)
    # each rank has a separate CUDA_VISIBLE_DEVICES
    sees_its_own = first.platform == "cpu" or len(devices) == wanted
    start = 0 if sees_its_own else communicator.local_rank * wanted
    if start + wanted > len(devices):
        what = (
            f"local rank {communicator.local_rank} takes devices {start} to {start + wanted - 1} "
            f"of JAX, which has {len(devices)} here"
        )
        fix = (
            "fewer devices, or fewer ranks on this host; on a CPU: "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N in the environment"
        )
        raise UserError(what, config.where("speed.devices"), fix)
    return list(devices[start : start + wanted])


def check_optimizer(config: Config) -> None:
    """Raises UserError if build() would reject the function of optim.name for any model."""
    load_jax(config.where("framework"))
    from hvdtrain.frameworks.jax.user_optimizer import UserFunction

    UserFunction(config)


def shapes(config: Config, task: Task) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters by name. Needs the memory of the weights, which init() may
    draw outside JAX."""
    jax = load_jax(config.where("framework"))
    from hvdtrain.frameworks.jax.model import JaxDevice, build_model

    model = build_model(
        config,
        task,
        JaxDevice(jax.local_devices(backend="cpu")[0], np.dtype("float32")),
        SingleProcessCommunicator(),
    )
    return {name: array.shape for name, array in zip(model.names, model.start, strict=True)}
