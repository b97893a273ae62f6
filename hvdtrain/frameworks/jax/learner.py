"""One rank's model in JAX: batches padded to few shapes, gradients that meet in one allreduce, everything else compiled."""

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
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.images import augment
from hvdtrain.data.source import Source
from hvdtrain.frameworks.jax.model import Model, Place, key_data
from hvdtrain.frameworks.jax.step import Formulas
from hvdtrain.frameworks.learner import Gpu, Task, check_fit, plain_names
from hvdtrain.frameworks.stopwatch import HostStopwatch, Stopwatch
from hvdtrain.optim.rule import Rule
from hvdtrain.recipe.noise_scale import noise_scale_sums


class JaxLearner:
    """A JAX model that gives logits (n, classes) for images (n, H, W, C), each image by itself: batches are padded with copies."""

    def __init__(self, config: Config, model: Model, rule: Rule, task: Task, communicator: Communicator, place: Place) -> None:
        self.model, self.communicator, self.place = model, communicator, place
        self.noise_scale, self.usual = config.log.noise_scale, usual_rows(config.batch.size, config.batch.micro, communicator.size)
        self.stopwatch: Stopwatch = HostStopwatch()
        self._exact = config.log.step_times
        self.waits_only_in_communication = self._told = self._exact or communicator.size > 1
        formulas = Formulas(config, model, rule, task, communicator.size)
        self._gradient, self._sums = jax.jit(formulas.gradient), jax.jit(formulas.sums)
        self._update = jax.jit(formulas.update, static_argnames="noisy", donate_argnums=(0, 1))
        self.weights = [place.to_device(p) for p in model.start]
        with place.numbers():
            self.optimizer_state = [
                tuple(place.to_device(np.array(slot)) for slot in optimizer_state) for optimizer_state in formulas.start(self.weights)
            ]
        self._nothing = place.to_device(np.zeros(sum(p.size for p in self.weights), place.dtype))

    def cache_on_device(self, source: Source) -> bool:
        return False

    def to_device(self, batch: Batch) -> Batch:
        n = len(batch["y"])
        if n == 0:
            return {"n": 0}
        batch = augment.augment_batch(batch)
        more = padded(n, self.usual) - n
        kinds = {"x": np.uint8, "y": np.int32, "y2": np.int32, "share": self.place.dtype}  # of what is not the same on the host
        there = {key: self.place.to_device(_copies(batch[key].astype(kind), more)) for key, kind in kinds.items() if key in batch}
        w = np.concatenate([batch.get("w", np.ones(n)), np.zeros(more)]).astype(self.place.dtype)
        return there | {"w": self.place.to_device(w), "n": n}

    def step(self, micro: Sequence[Batch], hyper: Hyper, seed: int) -> Sums:
        row, sums = self._nothing, _zero()
        enter = self.stopwatch.enter if self._told else _no_phases  # one that is only started takes no time
        self.stopwatch.enter("compute" if self._told else "")
        with self.place.numbers():
            for batch in micro:
                if batch["n"]:
                    part, more = self._gradient(self.weights, batch, hyper.batch)
                    row = part if row is self._nothing else row + part
                    sums = _add(sums, more, batch["n"])
            mean: Any = row
            if self.communicator.size > 1:
                mean = np.asarray(row)  # the host waits for the device here
                enter("communication")
                mean = self.communicator.allreduce(mean, "gradient.0")
            elif self._exact:
                jax.block_until_ready(row)
            enter("update")
        with jax.enable_x64(True):  # so that a rule's own numbers (1 - beta^t) are float64, as Python's are; arrays stay what they are
            self.weights, self.optimizer_state, nonfinite = self._update(
                self.weights, self.optimizer_state, mean, hyper, key_data(seed), noisy=hyper.noise > 0
            )
        if self._exact:
            jax.block_until_ready(self.weights)
        enter("")
        with self.place.numbers():
            if self.noise_scale:
                squares = jnp.vdot(row, row), jnp.vdot(mean, mean)  # before clipping and noise
                shares = noise_scale_sums(*squares, sums["count"], hyper.batch, self.communicator.size)
                sums |= {key: jnp.where(nonfinite > 0, 0.0, share) for key, share in shares.items()}
        return self._lasting(sums | {"nonfinite": nonfinite})

    def sync_buffers(self, communicator: Communicator) -> None:
        pass  # nothing is gathered beside the weights

    def evaluate(self, batch: Batch) -> Sums:
        if not batch["n"]:
            return _zero()
        with self.place.numbers():
            return self._lasting(_add(_zero(), self._sums(self.weights, batch), batch["n"]))

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self.views()}

    def views(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from ((f"p.{name}", np.asarray(p)) for name, p in zip(self.model.names, self.weights, strict=True))
        for name, optimizer_state in zip(self.model.names, self.optimizer_state, strict=True):
            yield from ((f"s.{name}.{i}", np.asarray(slot)) for i, slot in enumerate(optimizer_state))

    def state_dict_names(self) -> dict[str, str]:
        return plain_names(name for name, _ in self.views())

    def load(self, state: Arrays) -> None:
        own = self.state()
        check_fit(own, state)
        mine = {name: self.place.to_device(np.array(state[name], own[name].dtype)) for name in own}  # copies: the caller keeps its memory
        self.weights = [mine[f"p.{name}"] for name in self.model.names]
        self.optimizer_state = [
            tuple(mine[f"s.{n}.{i}"] for i in range(len(s))) for n, s in zip(self.model.names, self.optimizer_state, strict=True)
        ]

    def describe(self) -> str:
        device = f"{self.place.device.platform}:{self.place.device.id}"
        how = "gradients by one allreduce" if self.communicator.size > 1 else "no reduction"
        return f"{self.model.title}, {len(self._nothing):,} parameters, jax {self.place.dtype} on {device}, {how}"

    def gpu(self) -> Gpu | None:
        device = self.place.device
        if device.platform == "cpu":
            return None
        why = "JAX does not tell which GPU it is"
        return Gpu("", why, device.device_kind, lambda: (device.memory_stats() or {}).get("peak_bytes_in_use", 0))

    def profile(self, path: Path) -> AbstractContextManager[None]:
        return jax.profiler.trace(str(path), create_perfetto_trace=True)

    def _lasting(self, sums: Sums) -> Sums:
        """Sums that can be added outside of place.numbers(), where JAX would make float32 of float64."""
        return {name: float(value) for name, value in sums.items()} if self.place.dtype == np.float64 else sums


def _no_phases(phase: str) -> None:
    pass


def usual_rows(batch: int, micro: int | None, size: int) -> int:
    """The samples of a rank's largest micro-batch, as long as the global batch does not change."""
    share = -(-batch // size)
    return -(-share // -(-share // (micro or share)))


def padded(n: int, usual: int) -> int:
    """Rows for n samples: a function of n alone, so that a resumed job computes as a straight one, of few values: each is compiled.

    `usual` rows for a little less; any other number is rounded up to one of 8 in each doubling.
    """
    if usual - max(1, usual // 8) <= n <= usual:
        return usual
    step = max(1, 1 << n.bit_length() >> 4)
    return -(-n // step) * step


def _copies(array: np.ndarray, more: int) -> np.ndarray:
    """The array, and its last row `more` times: as finite as the data, whatever the model does with it."""
    return np.concatenate([array, np.repeat(array[-1:], more, axis=0)]) if more else array


def _zero() -> Sums:
    return {"loss": 0.0, "right": 0.0, "count": 0}


def _add(sums: Sums, more: Sums, samples: int) -> Sums:
    return {"loss": sums["loss"] + more["loss"], "right": sums["right"] + more["right"], "count": sums["count"] + samples}
