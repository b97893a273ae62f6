"""Learner: what the core asks of a framework, and the only door to one."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config import plugins
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.optim.rule import Rule


@dataclass(frozen=True)
class Task:
    """What a model is asked to do: images in, one of `classes` labels out."""

    shape: tuple[int, int, int]  # (H, W, C)
    classes: int
    mean: np.ndarray  # float64 (C,), of x / 255
    std: np.ndarray  # float64 (C,)


class Gpu(NamedTuple):
    """The accelerator of a rank, as the driver knows it."""

    uuid: str  # "GPU-...", or empty
    why: str  # there is none
    name: str  # of the product
    peak_bytes: Callable[[], int]  # most memory that this rank had of it


class Learner(Protocol):
    """A model and its optimizer on this rank."""

    stopwatch: Stopwatch  # the core enters "data", the learner the other phases of a step, and "" at its end
    waits_apart: bool  # all waiting for other ranks is in "communication", so what is left is this rank's own work

    def cache_on_device(self, source: Source) -> bool:
        """Whether the set stays on the device from now on: to_device() then takes "rows" ("rows2") in place of "x", "y" ("x2", "y2")."""

    def to_device(self, batch: Batch) -> Batch:
        """Host -> device, from any thread, with what data/images/augment.py has drawn for the samples done to them."""

    def step(self, micro: Sequence[Batch], hyper: Hyper, seed: int) -> Sums:
        """Forward, backward, reduction over ranks, update. Every rank gives equally many micro-batches; one may be empty.

        `seed` is the same on all ranks. A micro-batch with weights "w" is learned from with each sample's loss times its weight.
        Returns this rank's own sums {"loss", "right", "count"} over its samples, unweighted, as device scalars; and "nonfinite":
        1 / ranks where the loss of any rank or the mean gradient was not finite, else 0. With guard.nonfinite=skip such a step leaves
        weights, buffers and slots as they were, on every rank.
        """

    def sync_buffers(self, communicator: Communicator) -> None:
        """Makes equal on all ranks what each gathered from its own samples (running statistics). Every rank calls it."""

    def evaluate(self, batch: Batch) -> Sums:
        """The same sums, of a batch that is not learned from."""

    def state(self) -> Arrays:
        """A host copy of all that a resume needs: "p." weights, "b." buffers, "s." optimizer slots."""

    def views(self) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays of state() one by one, to be read before the next step: without a copy where they are in host memory."""

    def published(self) -> dict[str, str]:
        """{name that the framework's own users know: name in state()} of weights and buffers: a tied array has two of the former."""

    def load(self, state: Arrays) -> None:
        """Takes over a state. A name or shape that does not fit is a UserError."""

    def describe(self) -> str:
        """One line: model, parameters, device, and how gradients meet."""

    def gpu(self) -> Gpu | None:
        """None where the rank computes on processors."""

    def profile(self, path: Path) -> AbstractContextManager[None]:
        """What is done inside goes into the folder `path`, with the phases of each step; run/build.py refuses frameworks without."""


def check_knobs(config: Config, provenance: Provenance, communicator: Communicator) -> None:
    """A UserError for settings of Horovod's on another engine."""
    comm = config.comm
    knobs = {"hierarchical": comm.hierarchical, "cycle_ms": comm.cycle_ms is not None, "fusion_mb": comm.fusion_mb is not None}
    for key, given in knobs.items():
        if given and communicator.name != "horovod":
            raise UserError(f"comm.{key} is Horovod's; this is {communicator.name}", provenance.where(f"comm.{key}"), "leave it out")


def plain_dtype(config: Config, provenance: Provenance) -> np.dtype[Any]:
    """The number type of a framework that has one for all; a UserError for the wishes about speed that only framework=torch fulfils."""
    speed = config.speed
    wrong = {
        "speed.precision": speed.precision in ("bf16", "fp16"),
        "speed.compile": speed.compile != "none",
        "speed.channels_last": speed.channels_last is not None,
        "data.resident": bool(config.data.resident),
        "comm.compression": config.comm.compression != "none",
        "comm.op": config.comm.op != "mean",
        "comm.local_steps": config.comm.local_steps > 1,
        "comm.tune": config.comm.tune,
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(
                f"framework={config.framework} cannot do this {key}", provenance.where(key), f"leave {key} out, or framework=torch"
            )
    return np.dtype("float64" if speed.precision == "fp64" else "float32")


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """What published() gives where the names are the framework's own, but for "p." and "b."."""
    return {name[2:]: name for name in names if name.startswith(("p.", "b."))}


def check_fit(own: Arrays, given: Arrays) -> None:
    """Raises a UserError where `given` lacks a name of `own`, has another one, or has it in another shape."""
    fix = "give the model and options that the checkpoint was made with: they are in its run folder's config.yaml"
    odd = sorted(own.keys() ^ given.keys())
    if odd:
        side = "the state lacks" if odd[0] in own else "the model lacks"
        raise UserError(f"{side} {odd[0]}" + (f" and {len(odd) - 1} more" if len(odd) > 1 else ""), "state of the model", fix)
    for name, array in own.items():
        if array.shape != given[name].shape:
            raise UserError(f"{name} has shape {given[name].shape}, the model has {array.shape}", "state of the model", fix)


def make_model(config: Config, provenance: Provenance, task: Task, folder: str) -> Any:
    """What a leaf of `folder` builds, or the user's own package.module:name, which is given shape and classes where it asks for them."""
    name, options, where = config.model.name, config.model.options, provenance.where("model.name")
    if not plugins.is_dotted(name):
        make = plugins.load(folder, name, where).build
        return make(name, task.shape, task.classes, **plugins.check_options(make, options, "model", provenance))
    make = plugins.load_dotted(name, where)
    signature = inspect.signature(make)
    known: dict[str, Any] = {"shape": task.shape, "classes": task.classes}
    arguments = {key: value for key, value in known.items() if key in signature.parameters} | dict(options)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(f"{name}{signature} does not fit: {error}", where, "give its parameters as model.<name>=<value>") from None
    return make(**arguments)


def fair_threads(communicator: Communicator) -> int:
    """This rank's part of the cores that it may use. Every rank calls it."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    mine = (socket.gethostname(), tuple(cores))
    sharers = communicator.allgather_object(mine).count(mine)  # the launcher may give each rank cores of its own, or all ranks the same
    return max(1, len(cores) // sharers)


def build_rule(config: Config, provenance: Provenance) -> Rule:
    """The rule that optim.name means; a class of torch.optim is no rule."""
    name, where = config.optim.name, provenance.where("optim.name")
    if plugins.is_dotted(name):
        raise UserError(
            f"{name} is a torch optimizer, framework={config.framework} needs a rule", where, "framework=torch, or a name of `list`"
        )
    make = plugins.load("optim", name, where).build
    rule: Rule = make(**plugins.check_options(make, config.optim.options, "optim", provenance))
    return rule


def momentum(config: Config, provenance: Provenance) -> float:
    """optim.momentum, or where it is left out the rule's own; a class of torch.optim keeps what its constructor says."""
    if config.optim.momentum is not None or plugins.is_dotted(config.optim.name):
        return config.optim.momentum or 0.0
    return build_rule(config, provenance).momentum
