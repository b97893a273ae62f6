"""The numpy framework: softmax regression and linear least squares by hand-written gradients, the oracle of every other framework."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.metrics import Sums, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.images import augment
from hvdtrain.data.source import Source
from hvdtrain.frameworks.build_rule import build_rule
from hvdtrain.frameworks.learner import Learner, Task
from hvdtrain.frameworks.state import check_fit, plain_names
from hvdtrain.frameworks.stopwatch import HostStopwatch, Stopwatch
from hvdtrain.optim.clipping import clip
from hvdtrain.optim.rule import ArrayOps, Rule, is_excluded


class DeviceBatch(NamedTuple):
    """A micro-batch as the learner computes with it."""

    x: np.ndarray  # (n, C H W), normalised, in the learner's number type
    labels: np.ndarray  # int64 (n,)
    weights: np.ndarray | None = None  # float64 (n,), factors of the samples' losses
    partner_labels: np.ndarray | None = None  # int64 (n,), of the images mixed in (mixup)
    mixup_weight: np.ndarray | None = None  # float64 (n,) of `labels` in the loss


class NumpyLearner:
    """logits = x W' + b from zero weights; names and shapes are those of torch/models/linear.py."""

    def __init__(self, config: Config, task: Task, rule: Rule, communicator: Communicator, dtype: np.dtype[Any]) -> None:
        self.config, self.task, self.communicator = config, task, communicator
        self.skips_nonfinite = config.guard.nonfinite == "skip"
        self.dtype = dtype
        self.stopwatch: Stopwatch = HostStopwatch()
        self.waits_only_in_communication = True
        features = int(np.prod(task.shape))
        self.weights = {"fc.weight": np.zeros((task.classes, features), dtype), "fc.bias": np.zeros(task.classes, dtype)}
        self.ops = ArrayOps(np)
        self.optimizer_state = {name: rule.init(p, self.ops) for name, p in self.weights.items()}
        excluded = {name for name, p in self.weights.items() if is_excluded(p.shape) and config.optim.exclude == "norms_and_biases"}
        self.rules = {name: rule.without_trust_ratio() if name in excluded else rule for name in self.weights}
        self.decays = {name: 0.0 if name in excluded else 1.0 for name in self.weights}

    def cache_on_device(self, source: Source) -> bool:
        return False

    def to_device(self, batch: Batch) -> DeviceBatch:
        batch = augment.augment_batch(batch)
        x = (batch["x"] / 255.0 - self.task.mean) / self.task.std  # (n, H, W, C)
        x = x.transpose(0, 3, 1, 2).reshape(len(x), math.prod(self.task.shape))  # (n, C H W), as torch flattens; n may be 0
        return DeviceBatch(x.astype(self.dtype), batch["y"], batch.get("w"), batch.get("partner_y"), batch.get("mixup_weight"))

    @np.errstate(over="ignore", invalid="ignore")  # "nonfinite" reports it
    def step(self, micro: Sequence[DeviceBatch], hyper: Hyper, seed: int) -> Sums:
        gradient = np.zeros(sum(p.size for p in self.weights.values()), self.dtype)
        total = zero_sums()
        enter = self.stopwatch.enter
        for batch in micro:
            enter("forward")
            sums, error = self._forward(batch, self.config.model.label_smoothing)
            enter("backward")
            if batch.weights is not None:
                error = error * batch.weights[:, None]
            if not math.isfinite(sums["loss"]):
                error = np.full_like(error, np.nan)  # the reduction brings NaN to every rank
            error = error / hyper.batch  # a sum over ranks is then the mean over the global batch
            gradient += np.concatenate([(error.T @ batch.x).ravel(), error.sum(0)])
            total = {name: total[name] + sums[name] for name in total}
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

    def evaluate(self, batch: DeviceBatch) -> Sums:
        return self._forward(batch)[0]

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self.views()}

    def views(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from ((f"p.{name}", p) for name, p in self.weights.items())
        for name, state in self.optimizer_state.items():
            yield from ((f"s.{name}.{i}", array) for i, array in enumerate(state))

    def state_dict_names(self) -> dict[str, str]:
        return plain_names(name for name, _ in self.views())

    def load(self, state: Arrays) -> None:
        check_fit(dict(self.views()), state)
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

    def _forward(self, batch: DeviceBatch, smoothing: float = 0.0) -> tuple[Sums, np.ndarray]:
        """Sums over the batch, and d(sum of losses) / d(logits), (n, classes)."""
        logits = batch.x @ self.weights["fc.weight"].T + self.weights["fc.bias"]  # (n, classes)
        loss, error = self._loss(logits, batch.labels, smoothing)
        if batch.mixup_weight is not None and batch.partner_labels is not None:
            partner_loss, partner_error = self._loss(logits, batch.partner_labels, smoothing)
            weight = batch.mixup_weight.astype(self.dtype)
            loss = weight * loss + (1 - weight) * partner_loss
            error = weight[:, None] * error + (1 - weight)[:, None] * partner_error
        right = (logits.argmax(1) == batch.labels).sum()
        return {"loss": float(loss.sum()), "right": float(right), "count": len(logits)}, error

    def _loss(self, logits: np.ndarray, labels: np.ndarray, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
        """Each sample's loss (n,), and d(loss) / d(logits) (n, classes)."""
        target = np.eye(self.task.classes, dtype=self.dtype)[labels] * (1.0 - smoothing) + smoothing / self.task.classes
        if self.config.model.loss == "squared_error":
            error = logits - target
            return 0.5 * np.square(error).sum(1), error
        shifted = logits - logits.max(1, keepdims=True, initial=-np.inf)
        log_softmax = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        return -(log_softmax * target).sum(1), np.exp(log_softmax) - target

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


def build(config: Config, task: Task, communicator: Communicator) -> Learner:
    """The learner of framework=numpy: model.name=linear, which training/conflicts.py has made sure of."""
    dtype = np.dtype("float64" if config.speed.precision == "fp64" else "float32")
    return NumpyLearner(config, task, build_rule(config), communicator, dtype)


def shapes(config: Config, task: Task) -> dict[str, tuple[int, ...]]:
    """The parameters by name, as build() makes them, without their memory."""
    return {"fc.weight": (task.classes, math.prod(task.shape)), "fc.bias": (task.classes,)}
