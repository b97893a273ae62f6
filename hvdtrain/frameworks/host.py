"""HostLearner: a model with outputs and gradients in host memory, where NumPy computes losses,
reductions and updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream, Batch, Piece, as_stream, whole
from hvdtrain.core.metrics import Sums, add_sums, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.images.averaging import averaging_of
from hvdtrain.data.source import Source
from hvdtrain.frameworks.learner import Learner, Predictions, check_fit, global_weight, plain_names
from hvdtrain.frameworks.stopwatch import HostStopwatch, Stopwatch
from hvdtrain.optim.clip import clip
from hvdtrain.optim.rule import ArrayOps, Rule, is_excluded
from hvdtrain.tasks.task import DeviceAndDtype, NumpyPart, Task, part_of


class HostModel(Protocol):
    """The model of a HostLearner. Arrays are NumPy arrays; weights are named and ordered."""

    title: str  # for people: the kind of model, and what computes it
    notes: list[str]  # lines for the header
    weights: Mapping[str, np.ndarray]  # initial weights
    module: Any  # the framework's object; None if there is none

    def inputs(self, batch: Mapping[str, Any]) -> np.ndarray:
        """Returns the model's input, (n, ...), from the fields of a batch."""

    def assign(self, weights: Mapping[str, np.ndarray]) -> None:
        """Sets the weights."""

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """Returns (n, outputs) in evaluation mode."""

    def training_outputs(self, x: np.ndarray) -> np.ndarray:
        """Returns (n, outputs) in training mode; gradient() follows."""

    def gradient(self, error: np.ndarray, share: float) -> np.ndarray:
        """Returns the flat gradient of all weights, for the sum of error (n, outputs) times the
        last training_outputs() plus `share` times the last added_loss().
        """

    # The defaults are for a model whose layers have no added loss, no random numbers and no state.

    def added_loss(self) -> float:
        """Returns what the layers add to the mean loss in the last call: penalties of weights or
        activations."""
        return 0.0

    def constrained(self) -> dict[str, np.ndarray]:
        """Returns the weights that constraints of layers change after an update and assign(), by
        name."""
        return {}

    def seed(self, seed: int) -> None:
        """Seeds the layers that draw random numbers, until the next call."""
        return

    def buffers(self) -> dict[str, np.ndarray]:
        """Returns copies of the buffers, such as running statistics, by name."""
        return {}

    def assign_buffers(self, buffers: Mapping[str, np.ndarray]) -> None:
        """Sets the buffers."""
        return

    def is_mean(self, buffer: str) -> bool:
        """Whether ranks average the buffer; other buffers are copied from rank 0."""
        return False


class HostBatch(NamedTuple):
    """A micro-batch as the learner computes with it."""

    x: np.ndarray  # (n, ...), inputs of the model
    batch: Batch  # the rest: the fields, augmented, and "w" and "mixup_weight"
    weight: float  # of Task.weight()


class HostLearner(Learner):
    """A rank's model with its weights and optimizer state as NumPy arrays; gradients are reduced by
    one allreduce."""

    def __init__(
        self,
        config: Config,
        task: Task,
        model: HostModel,
        rule: Rule,
        communicator: Communicator,
        dtype: np.dtype[Any],
    ) -> None:
        self.config = config
        self.task = task
        self.model = model
        self.communicator = communicator
        self.notes = model.notes
        self.data = self.readers = communicator
        self.skips_nonfinite = config.guard.nonfinite == "skip"
        self.dtype = dtype
        self.part: NumpyPart = part_of(task, "numpy", config, DeviceAndDtype(dtype))
        self.averaging = averaging_of(config, task.fields)
        self.stopwatch: Stopwatch = HostStopwatch()
        self.waits_only_in_communication = True
        self.is_sharded = False
        self.weights = {name: np.array(p, dtype) for name, p in model.weights.items()}
        self.ops = ArrayOps(np)
        excluded = {
            name
            for name, p in self.weights.items()
            if is_excluded(p.shape) and config.optim.exclude == "norms_and_biases"
        }
        self.rules = {
            name: rule.of_parameter(name, p.shape, name in excluded)
            for name, p in self.weights.items()
        }
        self.optimizer_state = {
            name: self.rules[name].init(p, self.ops) for name, p in self.weights.items()
        }
        self.decays = {name: 0.0 if name in excluded else 1.0 for name in self.weights}
        model.assign(self.weights)

    def cache_on_device(self, source: Source) -> bool:
        return False

    def to_device(self, batch: Batch) -> HostBatch:
        if "augmentation" in batch:
            from hvdtrain.data.images.augment import augment_batch

            batch = augment_batch(batch)
        return HostBatch(self.model.inputs(batch), batch, self.task.weight(batch))

    @np.errstate(over="ignore", invalid="ignore")  # "nonfinite" reports it
    def step(self, micro: Sequence[HostBatch], hyper: Hyper, seed: int) -> Sums:
        gradient = np.zeros(sum(p.size for p in self.weights.values()), self.dtype)
        total = zero_sums(self.task.sums)
        divisor = global_weight(
            self.task, sum(batch.weight for batch in micro), hyper.batch, self.communicator
        )
        before = self.model.buffers() if self.skips_nonfinite else {}
        self.model.seed(seed)
        enter = self.stopwatch.enter
        for batch in micro:
            if not len(batch.x):
                continue
            enter("forward")
            outputs = self.model.training_outputs(batch.x)
            sums = self._sums(outputs, batch, self.model.added_loss(), training=True)
            enter("backward")
            error = self.part.gradient(outputs, batch.batch)
            if "w" in batch.batch:
                error = error * batch.batch["w"][:, None]
            if not math.isfinite(sums["loss"]):
                error = np.full_like(error, np.nan)  # the reduction brings NaN to every rank
            # A sum over ranks is then the mean over the global batch, also of added losses: each
            # counts by its share of the batch.
            gradient += self.model.gradient(error / divisor, batch.weight / divisor)
            total = add_sums(total, sums)
        enter("communication")
        mean = self.communicator.allreduce(gradient, "gradient.0")
        enter("update")
        bad = not np.isfinite(mean).all()
        if bad and self.skips_nonfinite:
            self.model.assign_buffers(before)
        else:
            self._update(mean, hyper, seed)
        enter("")
        return total | {"nonfinite": bad / self.communicator.size}

    @property
    def module(self) -> Any:
        return self.model.module

    def sync_buffers(self, communicator: Communicator) -> None:
        buffers = self.model.buffers()
        if communicator.size == 1 or not buffers:
            return
        means = {
            name: b / communicator.size for name, b in buffers.items() if self.model.is_mean(name)
        }
        found = {
            name: communicator.broadcast(b, f"settle.{name}")
            for name, b in buffers.items()
            if name not in means
        }
        if means:
            flat = communicator.allreduce(
                np.concatenate([b.ravel() for b in means.values()]), "settle"
            )
            ends = np.cumsum([b.size for b in means.values()])[:-1]
            found |= {
                name: part.reshape(means[name].shape)
                for name, part in zip(means, np.split(flat, ends), strict=True)
            }
        self.model.assign_buffers(found)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        weights = self.weights
        try:
            if self.config.optim.averages and all(
                state[-1] > 0 for state in self.optimizer_state.values()
            ):
                self.weights = {name: state[-2] for name, state in self.optimizer_state.items()}
                self.model.assign(self.weights)
            yield
        finally:
            self.weights = weights
            self.model.assign(weights)

    def evaluate(self, batch: HostBatch) -> Sums:
        return self.predict(batch).sums

    def predict(self, batch: HostBatch) -> Predictions:
        added: list[float] = []  # the added loss of each view

        def outputs_of(arrays: Mapping[str, Any]) -> np.ndarray:
            outputs = self.model.outputs(
                batch.x if arrays is batch.batch else self.model.inputs(arrays)
            )
            added.append(self.model.added_loss())
            return outputs

        outputs = self.averaging.mean(batch.batch, outputs_of, np)
        return Predictions(
            outputs, self._sums(outputs, batch, sum(added) / len(added), training=False)
        )

    def state(self, *, is_kept: bool = True) -> Arrays:
        return {name: array.copy() for name, array in self._arrays()} if is_kept else {}

    def pieces(self) -> Iterator[Piece]:
        return (whole(name, array) for name, array in self._arrays())

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from ((f"p.{name}", p) for name, p in self.weights.items())
        yield from ((f"b.{name}", b) for name, b in self.model.buffers().items())
        for name, state in self.optimizer_state.items():
            yield from ((f"s.{name}.{i}", array) for i, array in enumerate(state))

    def state_dict_names(self) -> dict[str, str]:
        return plain_names(name for name, _ in self._arrays())

    def load(self, state: Arrays | ArrayStream) -> None:
        stream = as_stream(state)
        check_fit(
            {name: array.shape for name, array in self._arrays()}, stream.shapes, stream.is_partial
        )
        state = dict(self._arrays()) | dict(stream.arrays)
        for name, old in self.optimizer_state.items():
            self.weights[name] = state[f"p.{name}"].astype(self.dtype)
            self.optimizer_state[name] = tuple(
                state[f"s.{name}.{i}"].astype(self.dtype) for i in range(len(old))
            )
        self.model.assign(self.weights)
        self.model.assign_buffers({name: state[f"b.{name}"] for name in self.model.buffers()})

    def describe(self) -> str:
        parameters = sum(p.size for p in self.weights.values())
        return (
            f"{self.model.title.replace('%', f'{parameters:,} parameters')}, gradients by one "
            "allreduce"
        )

    def gpu(self) -> None:
        return None

    def profile(self, path: Path) -> NoReturn:
        """Raises NotImplementedError: the host has no profiler."""
        # training/conflicts.py rejects profile.steps
        raise NotImplementedError(f"no profiler to write {path}")

    def _sums(
        self, outputs: np.ndarray, batch: HostBatch, added_loss: float, training: bool
    ) -> Sums:
        each = self.part.each(outputs, batch.batch, training)
        terms = {name: _number_or_tuple(term.sum(0)) for name, term in each.terms.items()}
        return {
            "loss": float(each.loss.sum()) + batch.weight * added_loss,
            **terms,
            **each.parts,
            "count": len(outputs),
        }

    def _update(self, gradient: np.ndarray, hyper: Hyper, seed: int) -> None:
        gradients = np.split(gradient, np.cumsum([p.size for p in self.weights.values()])[:-1])
        gradients = clip(gradients, self.config.optim.clip_norm, self.config.optim.clip_value, np)
        random = np.random.default_rng(seed)
        for (name, p), g in zip(self.weights.items(), gradients, strict=True):
            if hyper.noise:
                g = g + random.normal(0.0, hyper.noise**0.5, g.shape)  # noqa: PLW2901 (the same on every rank, since the seed is)
            h = hyper._replace(weight_decay=hyper.weight_decay * self.decays[name])
            new_p, new_state = self.rules[name].update(
                g.astype(self.dtype).reshape(p.shape), self.optimizer_state[name], p, h, self.ops
            )
            self.weights[name], self.optimizer_state[name] = new_p.astype(self.dtype), new_state
        self.model.assign(self.weights)
        self.weights |= self.model.constrained()


def _number_or_tuple(total: Any) -> Any:
    return tuple(total.tolist()) if np.ndim(total) else float(total)
