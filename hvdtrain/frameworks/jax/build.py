"""The JAX frame: what it can do, JAX itself, its device and its threads; the learner is in jax_learner.py."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Engine
from hvdtrain.config.read import Origins
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner, Task, build_rule, check_knobs, fair_threads, plain_dtype


def build(config: Config, origins: Origins, task: Task, engine: Engine) -> Learner:
    """The learner of frame=jax."""
    refuse(config, origins)
    check_knobs(config, origins, engine)
    jax = load_jax(origins)
    start_threads(jax, engine)
    from hvdtrain.frameworks.jax.learner import JaxLearner
    from hvdtrain.frameworks.jax.model import Place, build_model

    place = Place(pick_device(jax, config, origins, engine), plain_dtype(config, origins))
    model = build_model(config, origins, task, place)
    return JaxLearner(config, model, build_rule(config, origins), task, engine, place)


def refuse(config: Config, origins: Origins) -> None:
    """A UserError for what frame=torch alone does."""
    impossible = {
        "comm.reduce": config.comm.reduce != "auto",
        "norm.kind": config.norm.kind != "batch",
        "model.classifier_std": config.model.classifier_std is not None,
    }
    plain_dtype(config, origins)
    for key, wrong in impossible.items():
        if wrong:
            raise UserError(f"frame=jax cannot do this {key}", origins.where(key), f"leave {key} out, or frame=torch")


def load_jax(origins: Origins) -> Any:
    """The module, of a version that switches float64 on for a part of a program."""
    fix = "pip install 'hvdtrain[jax]'"
    try:
        jax = importlib.import_module("jax")
    except ModuleNotFoundError as error:
        raise UserError(f"frame=jax needs jax: {error}", origins.where("frame"), fix) from error
    if not hasattr(jax, "enable_x64"):
        raise UserError(f"frame=jax needs jax 0.8 or later; this is {jax.__version__}", origins.where("frame"), fix)
    return jax


def start_threads(jax: Any, engine: Engine) -> None:
    """Starts JAX with this rank's part of the cores that it may use. Every rank calls it.

    JAX takes as many threads as the process may use cores, once, at its start; it does not read OMP_NUM_THREADS, and its XLA flags leave
    the number as it is. PJRT_NPROC sets it: the user's own wins, then OMP_NUM_THREADS. No effect where JAX has started before.
    """
    asked, fair = os.environ.get("OMP_NUM_THREADS", ""), fair_threads(engine)
    threads = int(asked) if asked.isdecimal() and int(asked) else fair
    ours = "PJRT_NPROC" not in os.environ
    os.environ.setdefault("PJRT_NPROC", str(threads))
    try:
        jax.devices()  # reads it
    finally:
        if ours:
            del os.environ["PJRT_NPROC"]


def pick_device(jax: Any, config: Config, origins: Origins, engine: Engine) -> Any:
    """The device of this rank's local rank among those that JAX prefers, or the CPU."""
    devices = jax.local_devices(backend="cpu") if config.speed.device == "cpu" else jax.local_devices()
    if config.speed.device == "cuda" and devices[0].platform != "gpu":
        fix = "speed.device=cpu, or a jax built for this GPU: pip install 'jax[cuda12]'"
        raise UserError("no CUDA device is visible to jax", origins.where("speed.device"), fix)
    return devices[engine.local_rank % len(devices)]


def shapes(config: Config, origins: Origins, task: Task) -> dict[str, tuple[int, ...]]:
    """The parameters by name, as build() makes them. It takes the memory of the weights: first weights may be drawn outside of JAX."""
    refuse(config, origins)
    jax = load_jax(origins)
    from hvdtrain.frameworks.jax.model import Place, build_model

    model = build_model(config, origins, task, Place(jax.local_devices(backend="cpu")[0], np.dtype("float32")))
    return {name: array.shape for name, array in zip(model.names, model.start, strict=True)}
