"""JaxLearner: one rank's model in JAX. Batches are padded to few shapes, gradients reduced in one allreduce, all else is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.metrics import Sums, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.images import augment
from hvdtrain.data.source import Source
from hvdtrain.frameworks.jax.model import Model, Target, key_data
from hvdtrain.frameworks.jax.step import DeviceBatch, Formulas
from hvdtrain.frameworks.learner import Gpu, Task
from hvdtrain.frameworks.state import check_fit, plain_names
from hvdtrain.frameworks.stopwatch import HostStopwatch, Stopwatch
from hvdtrain.optim.rule import Rule
from hvdtrain.recipe.noise_scale import noise_scale_sums


class JaxLearner:
    """A JAX model that gives logits (n, classes) for images (n, H, W, C), each image by itself: batches are padded with copies."""

    def __init__(self, config: Config, model: Model, rule: Rule, task: Task, communicator: Communicator, target: Target) -> None:
        self.model, self.communicator, self.target = model, communicator, target
        self.noise_scale = config.log.noise_scale
        self.largest = largest_micro_batch(config.batch.size, config.batch.micro, communicator.size)
        self.stopwatch: Stopwatch = HostStopwatch()
        self._waits_for_phases = config.log.step_times  # the host waits for the device at the end of each phase, to time it
        self.waits_only_in_communication = self._times_phases = self._waits_for_phases or communicator.size > 1
        formulas = Formulas(config, model, rule, task, communicator.size)
        self._gradient, self._sums = jax.jit(formulas.gradient), jax.jit(formulas.sums)
        self._update = jax.jit(formulas.update, static_argnames="noisy", donate_argnums=(0, 1))
        self.weights = [target.to_device(p) for p in model.start]
        with target.enable_x64():
            self.optimizer_state = [tuple(target.to_device(np.array(array)) for array in state) for state in formulas.start(self.weights)]
        self._zero_row = target.to_device(np.zeros(sum(p.size for p in self.weights), target.dtype))

    def cache_on_device(self, source: Source) -> bool:
        return False

    def to_device(self, batch: Batch) -> DeviceBatch:
        n = len(batch["y"])
        if n == 0:
            return DeviceBatch(0)
        batch = augment.augment_batch(batch)
        padding = rows_for(n, self.largest) - n

        def padded(name: str, dtype: Any) -> jax.Array | None:
            return self.target.to_device(_pad(batch[name].astype(dtype), padding)) if name in batch else None

        weights = np.concatenate([batch.get("w", np.ones(n)), np.zeros(padding)]).astype(self.target.dtype)
        return DeviceBatch(
            n,
            images=padded("x", np.uint8),
            labels=padded("y", np.int32),
            weights=self.target.to_device(weights),
            partner_labels=padded("partner_y", np.int32),
            mixup_weight=padded("mixup_weight", self.target.dtype),
        )

    def step(self, micro: Sequence[DeviceBatch], hyper: Hyper, seed: int) -> Sums:
        row, sums = self._zero_row, zero_sums()  # the row: the gradients of all parameters
        enter = self.stopwatch.enter if self._times_phases else _no_phases  # work that is only started takes no time
        self.stopwatch.enter("compute" if self._times_phases else "")
        with self.target.enable_x64():
            for batch in micro:
                if batch.n:
                    gradient, batch_sums = self._gradient(self.weights, batch, hyper.batch)
                    row = gradient if row is self._zero_row else row + gradient
                    sums = _add(sums, batch_sums, batch.n)
            mean: Any = row
            if self.communicator.size > 1:
                mean = np.asarray(row)  # the host waits for the device here
                enter("communication")
                mean = self.communicator.allreduce(mean, "gradient.0")
            elif self._waits_for_phases:
                jax.block_until_ready(row)
            enter("update")
        with jax.enable_x64(True):  # so that a rule's own numbers (1 - beta^t) are float64, as Python's are; arrays stay what they are
            self.weights, self.optimizer_state, nonfinite = self._update(
                self.weights, self.optimizer_state, mean, hyper, key_data(seed), noisy=hyper.noise > 0
            )
        if self._waits_for_phases:
            jax.block_until_ready(self.weights)
        enter("")
        with self.target.enable_x64():
            if self.noise_scale:
                squares = jnp.vdot(row, row), jnp.vdot(mean, mean)  # before clipping and noise
                found = noise_scale_sums(*squares, sums["count"], hyper.batch, self.communicator.size)
                sums |= {key: jnp.where(nonfinite > 0, 0.0, value) for key, value in found.items()}
        return self._host_float64(sums | {"nonfinite": nonfinite})

    def sync_buffers(self, communicator: Communicator) -> None:
        pass  # JAX models have no buffers, and all ranks' weights are equal

    def evaluate(self, batch: DeviceBatch) -> Sums:
        if not batch.n:
            return zero_sums()
        with self.target.enable_x64():
            return self._host_float64(_add(zero_sums(), self._sums(self.weights, batch), batch.n))

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self.views()}

    def views(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from ((f"p.{name}", np.asarray(p)) for name, p in zip(self.model.names, self.weights, strict=True))
        for name, state in zip(self.model.names, self.optimizer_state, strict=True):
            yield from ((f"s.{name}.{i}", np.asarray(array)) for i, array in enumerate(state))

    def state_dict_names(self) -> dict[str, str]:
        return plain_names(name for name, _ in self.views())

    def load(self, state: Arrays) -> None:
        live = dict(self.views())
        check_fit(live, state)
        copies = {name: self.target.to_device(np.array(state[name], live[name].dtype)) for name in live}  # the caller keeps its memory
        self.weights = [copies[f"p.{name}"] for name in self.model.names]
        self.optimizer_state = [
            tuple(copies[f"s.{name}.{i}"] for i in range(len(old)))
            for name, old in zip(self.model.names, self.optimizer_state, strict=True)
        ]

    def describe(self) -> str:
        device = f"{self.target.device.platform}:{self.target.device.id}"
        how = "gradients by one allreduce" if self.communicator.size > 1 else "no reduction"
        return f"{self.model.title}, {len(self._zero_row):,} parameters, jax {self.target.dtype} on {device}, {how}"

    def gpu(self) -> Gpu | None:
        device = self.target.device
        if device.platform == "cpu":
            return None
        why = "JAX does not report the identity of the GPU"
        return Gpu("", why, device.device_kind, lambda: (device.memory_stats() or {}).get("peak_bytes_in_use", 0))

    def profile(self, path: Path) -> AbstractContextManager[None]:
        return jax.profiler.trace(str(path), create_perfetto_trace=True)

    def _host_float64(self, sums: Sums) -> Sums:
        """float64 sums as Python's own: outside of enable_x64() JAX would add them as float32."""
        return {name: float(value) for name, value in sums.items()} if self.target.dtype == np.float64 else sums


def _no_phases(phase: str) -> None:
    pass


def largest_micro_batch(batch: int, micro: int | None, size: int) -> int:
    """The samples of a rank's largest micro-batch, as long as the global batch does not change."""
    share = -(-batch // size)
    return -(-share // -(-share // (micro or share)))


def rows_for(n: int, largest: int) -> int:
    """Rows, with padding, for n samples: a function of n alone, so that a resumed job computes as a straight one.

    It has few values, since each is compiled: `largest` for a little less, and any other n is rounded up to one of 8 in each doubling.
    """
    if largest - max(1, largest // 8) <= n <= largest:
        return largest
    step = max(1, 1 << n.bit_length() >> 4)
    return -(-n // step) * step


def _pad(array: np.ndarray, padding: int) -> np.ndarray:
    """The array, and its last row `padding` times: what a model computes of copies is finite where the data's is."""
    return np.concatenate([array, np.repeat(array[-1:], padding, axis=0)]) if padding else array


def _add(sums: Sums, more: Sums, samples: int) -> Sums:
    return {"loss": sums["loss"] + more["loss"], "right": sums["right"] + more["right"], "count": sums["count"] + samples}
