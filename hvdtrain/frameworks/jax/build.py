"""The JAX framework: builds a rank's learner; what it cannot do, JAX itself, its device and its threads."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner, Task, build_rule, fair_threads, plain_dtype


def build(config: Config, provenance: Provenance, task: Task, communicator: Communicator) -> Learner:
    """The learner of framework=jax."""
    jax = load_jax(provenance)
    start_threads(jax, communicator)
    from hvdtrain.frameworks.jax.learner import JaxLearner
    from hvdtrain.frameworks.jax.model import Target, build_model

    target = Target(pick_device(jax, config, provenance, communicator), plain_dtype(config))
    model = build_model(config, provenance, task, target)
    return JaxLearner(config, model, build_rule(config, provenance), task, communicator, target)


def load_jax(provenance: Provenance) -> Any:
    """The module, of a version that switches float64 on for a part of a program."""
    fix = "pip install 'hvdtrain[jax]'"
    try:
        jax = importlib.import_module("jax")
    except ModuleNotFoundError as error:
        raise UserError(f"framework=jax needs jax: {error}", provenance.where("framework"), fix) from error
    if not hasattr(jax, "enable_x64"):
        raise UserError(f"framework=jax needs jax 0.8 or later; this is {jax.__version__}", provenance.where("framework"), fix)
    return jax


def start_threads(jax: Any, communicator: Communicator) -> None:
    """Starts JAX with this rank's part of the cores that it may use. Every rank calls it.

    JAX takes as many threads as the process may use cores, once, at its start; it does not read OMP_NUM_THREADS, and its XLA flags leave
    the number as it is. PJRT_NPROC sets it: the user's own wins, then OMP_NUM_THREADS. No effect where JAX has started before.
    """
    asked, fair = os.environ.get("OMP_NUM_THREADS", ""), fair_threads(communicator)
    threads = int(asked) if asked.isdecimal() and int(asked) else fair
    ours = "PJRT_NPROC" not in os.environ
    os.environ.setdefault("PJRT_NPROC", str(threads))
    try:
        jax.devices()  # reads it
    finally:
        if ours:
            del os.environ["PJRT_NPROC"]


def pick_device(jax: Any, config: Config, provenance: Provenance, communicator: Communicator) -> Any:
    """The device of this rank's local rank among those that JAX prefers, or the CPU."""
    devices = jax.local_devices(backend="cpu") if config.speed.device == "cpu" else jax.local_devices()
    if config.speed.device == "cuda" and devices[0].platform != "gpu":
        fix = "speed.device=cpu, or a jax built for this GPU: pip install 'jax[cuda12]'"
        raise UserError("no CUDA device is visible to jax", provenance.where("speed.device"), fix)
    return devices[communicator.local_rank % len(devices)]


def shapes(config: Config, provenance: Provenance, task: Task) -> dict[str, tuple[int, ...]]:
    """The parameters by name, as build() makes them. It takes the memory of the weights: first weights may be drawn outside of JAX."""
    jax = load_jax(provenance)
    from hvdtrain.frameworks.jax.model import Target, build_model

    model = build_model(config, provenance, task, Target(jax.local_devices(backend="cpu")[0], np.dtype("float32")))
    return {name: array.shape for name, array in zip(model.names, model.start, strict=True)}
