"""Learner: the protocol between the trainer and a framework; each framework's build() returns one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.source import Source
from hvdtrain.frameworks.stopwatch import Stopwatch


@dataclass(frozen=True)
class Task:
    """What a model is trained for: images in, one of `classes` labels out."""

    shape: tuple[int, int, int]  # (H, W, C)
    classes: int
    mean: np.ndarray  # float64 (C,), of x / 255 over the training set
    std: np.ndarray  # float64 (C,), of the same; never 0


class Gpu(NamedTuple):
    """The accelerator of a rank, as the driver knows it."""

    uuid: str  # "GPU-...", or empty
    why: str  # the reason why uuid is empty
    name: str  # of the product
    peak_bytes: Callable[[], int]  # the most memory that this rank has allocated


class Learner(Protocol):
    """A model and its optimizer on this rank, and the arithmetic of a step: everything that the trainer needs from a framework.

    One thread trains and calls all methods; only to_device() is also called by the threads that read ahead. Methods marked "A collective"
    communicate with the other ranks: every rank calls them, in the same order.

    A DeviceBatch is what to_device() of the same learner returns; its type is the framework's own. Sums are over samples, never means,
    and their values are device scalars that float() takes: converting one may wait for the device, adding them does not.
    """

    @property
    def stopwatch(self) -> Stopwatch:
        """The phases of a step: the trainer enters "data" before it takes a batch, the learner the others, and "" at the step's end."""

    @property
    def waits_only_in_communication(self) -> bool:
        """Whether all waiting for other ranks is in the phase "communication": the rest of a step is then this rank's own work."""

    def cache_on_device(self, source: Source) -> bool:
        """Copies the whole set to the device where data.resident and the device allow it; returns whether. Once, before the first step.

        to_device() then takes "indices" and "partner_indices" in place of images and labels. Raises UserError where data.resident=true asks
        for a set that does not fit.
        """

    def to_device(self, batch: Batch) -> Any:
        """Copies a batch from host memory to the device, and applies the augmentation parameters that the batch has.

        The batch has the keys that core/arrays.py lists; n may be 0. The learner may keep the arrays' memory.
        """

    def step(self, micro: Sequence[Any], hyper: Hyper, seed: int) -> Sums:
        """Forward, backward, reduction over ranks, update. A collective.

        `micro` are DeviceBatches, one for each pass, equally many on every rank; one may be empty. `hyper` and `seed` are the same on all
        ranks. The gradient is that of the sum over all ranks of each sample's loss times its weight "w", 1 where there is none, divided
        by hyper.batch.

        Returns this rank's own sums {"loss", "right", "count"} over its samples, unweighted; "nonfinite", 1 / ranks where the loss of
        any rank or the mean gradient was not finite, else 0; and with log.noise_scale those of recipe/noise_scale.py. With
        guard.nonfinite=skip a step that is not finite leaves weights, buffers and optimizer state as they were, on every rank.
        """

    def sync_buffers(self, communicator: Communicator) -> None:
        """Makes equal on all ranks what each computed from its own samples: running statistics, and weights after local steps.

        A collective. Call it before weights are compared, evaluated or saved.
        """

    def evaluate(self, batch: Any) -> Sums:
        """{"loss", "right", "count"} of a DeviceBatch in evaluation mode: no dropout, no label smoothing, running statistics."""

    def state(self) -> Arrays:
        """A host copy of everything that a resume needs: "p.<name>" weights, "b.<name>" buffers, "s.<name>.<key>" optimizer state.

        Names and shapes are the same on all ranks and, for one model, in all frameworks; dtypes are the learner's own.
        """

    def views(self) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays of state() one by one: without a copy where they are in host memory, valid until the next step."""

    def state_dict_names(self) -> dict[str, str]:
        """{name in the framework's own state dict: name in state()}, of weights and buffers; a tied array has two names."""

    def load(self, state: Arrays) -> None:
        """Copies a state into the live arrays. Raises UserError where a name or a shape does not fit."""

    def describe(self) -> str:
        """One line: model, number of parameters, number type, device, and how gradients are reduced."""

    def gpu(self) -> Gpu | None:
        """The rank's GPU; None where it computes on a CPU."""

    def profile(self, path: Path) -> AbstractContextManager[None]:
        """Writes a trace of what is done inside into the folder `path`, with the phases of each step.

        training/conflicts.py refuses profile.steps with a framework that has no profiler.
        """
