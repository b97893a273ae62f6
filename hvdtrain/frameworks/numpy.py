"""The numpy framework: one linear layer by hand-written gradients of each task's loss, the reference of the other frameworks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream, Batch, Piece, as_stream, whole
from hvdtrain.core.metrics import Sums, add_sums, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.images import augment
from hvdtrain.data.images.views import make_views
from hvdtrain.data.source import Source
from hvdtrain.frameworks.by_name import build_rule, check_patterns
from hvdtrain.frameworks.learner import Learner, Predictions, check_fit, global_weight, plain_names
from hvdtrain.frameworks.stopwatch import HostStopwatch, Stopwatch
from hvdtrain.optim.rule import ArrayOps, Rule, clip, is_excluded
from hvdtrain.tasks.task import NumpyPart, Place, Task, part_of


class DeviceBatch(NamedTuple):
    """A micro-batch as the learner computes with it."""

    x: np.ndarray  # (n, features), as the task prepares it, in the learner's number type
    batch: Batch  # the rest: the fields, augmented, and "w" and "mixup_weight"
    weight: int  # of Task.weight()


class NumpyLearner(Learner):
    """outputs = x W' + b from zero weights; names and shapes are those of torch/models/linear.py."""

    def __init__(self, config: Config, task: Task, rule: Rule, communicator: Communicator, dtype: np.dtype[Any]) -> None:
        self.config, self.task, self.communicator = config, task, communicator
        self.data = self.readers = communicator
        self.skips_nonfinite = config.guard.nonfinite == "skip"
        self.dtype = dtype
        self.part: NumpyPart = part_of(task, "numpy", config, Place(dtype))
        self.views = make_views(config, task.fields)
        self.stopwatch: Stopwatch = HostStopwatch()
        self.waits_only_in_communication = True
        self.is_sharded = False
        self.weights = {name: np.zeros(shape, dtype) for name, shape in shapes(config, task).items()}
        self.ops = ArrayOps(np)
        excluded = {name for name, p in self.weights.items() if is_excluded(p.shape) and config.optim.exclude == "norms_and_biases"}
        self.rules = {name: rule.of_parameter(name, p.shape, name in excluded) for name, p in self.weights.items()}
        self.optimizer_state = {name: self.rules[name].init(p, self.ops) for name, p in self.weights.items()}
        self.decays = {name: 0.0 if name in excluded else 1.0 for name in self.weights}

    def cache_on_device(self, source: Source) -> bool:
        return False

    def to_device(self, batch: Batch) -> DeviceBatch:
        batch = augment.augment_batch(batch)
        return DeviceBatch(self.part.inputs(batch), batch, self.task.weight(batch))

    @np.errstate(over="ignore", invalid="ignore")  # "nonfinite" reports it
    def step(self, micro: Sequence[DeviceBatch], hyper: Hyper, seed: int) -> Sums:
        gradient = np.zeros(sum(p.size for p in self.weights.values()), self.dtype)
        total = zero_sums(self.task.sums)
        divisor = global_weight(self.task, sum(batch.weight for batch in micro), hyper.batch, self.communicator)
        enter = self.stopwatch.enter
        for batch in micro:
            enter("forward")
            outputs = self._outputs(batch.x)
            sums = self._sums(outputs, batch, training=True)
            enter("backward")
            error = self.part.gradient(outputs, batch.batch)
            if "w" in batch.batch:
                error = error * batch.batch["w"][:, None]
            if not math.isfinite(sums["loss"]):
                error = np.full_like(error, np.nan)  # the reduction brings NaN to every rank
            error = error / divisor  # a sum over ranks is then the mean over the global batch
            gradient += np.concatenate([(error.T @ batch.x).ravel(), error.sum(0)])
            total = add_sums(total, sums)
        enter("communication")
        mean = self.communicator.allreduce(gradient, "gradient.0")
        enter("update")
        bad = not np.isfinite(mean).all()
        if not (bad and self.skips_nonfinite):
            self._update(mean, hyper, seed)
        enter("")
        return total | {"nonfinite": bad / self.communicator.size}

    def sync_buffers(self, communicator: Communicator) -> None:
        pass  # the model has no buffers, and all ranks' weights are equal

    @contextmanager
    def averaged(self) -> Iterator[None]:
        weights = self.weights
        try:
            if self.config.optim.ema is not None and all(state[-1] > 0 for state in self.optimizer_state.values()):
                self.weights = {name: state[-2] for name, state in self.optimizer_state.items()}
            yield
        finally:
            self.weights = weights

    def evaluate(self, batch: DeviceBatch) -> Sums:
        return self.predict(batch).sums

    def predict(self, batch: DeviceBatch) -> Predictions:
        def outputs_of(arrays: Mapping[str, Any]) -> np.ndarray:
            return self._outputs(batch.x if arrays is batch.batch else self.part.inputs(arrays))

        outputs = self.views.mean(batch.batch, outputs_of, np)
        return Predictions(outputs, self._sums(outputs, batch, training=False))

    def state(self, *, is_kept: bool = True) -> Arrays:
        return {name: array.copy() for name, array in self._arrays()} if is_kept else {}

    def pieces(self) -> Iterator[Piece]:
        return (whole(name, array) for name, array in self._arrays())

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from ((f"p.{name}", p) for name, p in self.weights.items())
        for name, state in self.optimizer_state.items():
            yield from ((f"s.{name}.{i}", array) for i, array in enumerate(state))

    def state_dict_names(self) -> dict[str, str]:
        return plain_names(name for name, _ in self._arrays())

    def load(self, state: Arrays | ArrayStream) -> None:
        stream = as_stream(state)
        check_fit({name: array.shape for name, array in self._arrays()}, stream.shapes, stream.is_partial)
        state = dict(self._arrays()) | dict(stream.arrays)
        for name, old in self.optimizer_state.items():
            self.weights[name] = state[f"p.{name}"].astype(self.dtype)
            self.optimizer_state[name] = tuple(state[f"s.{name}.{i}"].astype(self.dtype) for i in range(len(old)))

    def describe(self) -> str:
        parameters = sum(p.size for p in self.weights.values())
        return f"linear, {parameters:,} parameters, numpy {self.dtype} on the CPU, gradients by one allreduce"

    def gpu(self) -> None:
        return None

    def profile(self, path: Path) -> NoReturn:
        """Raises NotImplementedError: numpy has no profiler."""
        raise NotImplementedError(f"numpy has no profiler to write {path}")  # training/conflicts.py refuses profile.steps

    def _outputs(self, x: np.ndarray) -> np.ndarray:
        """(n, features) -> (n, outputs)"""
        outputs: np.ndarray = x @ self.weights["fc.weight"].T + self.weights["fc.bias"]
        return outputs

    def _sums(self, outputs: np.ndarray, batch: DeviceBatch, training: bool) -> Sums:
        each = self.part.each(outputs, batch.batch, training)
        terms = {name: _number_or_tuple(term.sum(0)) for name, term in each.terms.items()}
        return {"loss": float(each.loss.sum()), **terms, "count": len(outputs)}

    def _update(self, gradient: np.ndarray, hyper: Hyper, seed: int) -> None:
        gradients = np.split(gradient, np.cumsum([p.size for p in self.weights.values()])[:-1])
        gradients = clip(gradients, self.config.optim.clip_norm, self.config.optim.clip_value, np)
        random = np.random.default_rng(seed)
        for (name, p), g in zip(self.weights.items(), gradients, strict=True):
            if hyper.noise:
                g = g + random.normal(0.0, hyper.noise**0.5, g.shape)  # noqa: PLW2901 (the same on every rank, since the seed is)
            h = hyper._replace(weight_decay=hyper.weight_decay * self.decays[name])
            new_p, new_state = self.rules[name].update(g.astype(self.dtype).reshape(p.shape), self.optimizer_state[name], p, h, self.ops)
            self.weights[name], self.optimizer_state[name] = new_p.astype(self.dtype), new_state


def _number_or_tuple(total: Any) -> Any:
    return tuple(total.tolist()) if np.ndim(total) else float(total)


def build(config: Config, task: Task, communicator: Communicator) -> Learner:
    """The learner of framework=numpy: model.name=linear, which training/conflicts.py has made sure of."""
    check_patterns(config, shapes(config, task))
    dtype = np.dtype("float64" if config.speed.precision == "fp64" else "float32")
    return NumpyLearner(config, task, build_rule(config), communicator, dtype)


def shapes(config: Config, task: Task) -> dict[str, tuple[int, ...]]:
    """The parameters by name, as build() makes them, without their memory."""
    outputs = task.sizes["outputs"]
    return {"fc.weight": (outputs, math.prod(task.sizes["shape"])), "fc.bias": (outputs,)}
