"""The numpy framework: softmax regression and linear least squares by hand-written gradients, the oracle of every other framework."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.images import augment
from hvdtrain.data.source import Source
from hvdtrain.frameworks.learner import Learner, Task, build_rule, check_fit, plain_dtype, plain_names
from hvdtrain.frameworks.stopwatch import HostStopwatch, Stopwatch
from hvdtrain.optim.clipping import clip
from hvdtrain.optim.rule import ArrayOps, Rule, is_excluded


class NumpyLearner:
    """logits = x W' + b from zero weights; names and shapes are those of models/linear.py."""

    def __init__(self, config: Config, task: Task, rule: Rule, communicator: Communicator, dtype: np.dtype[Any]) -> None:
        self.config, self.task, self.communicator = config, task, communicator
        self.skips = config.guard.nonfinite == "skip"
        self.dtype = dtype
        self.stopwatch: Stopwatch = HostStopwatch()
        self.waits_only_in_communication = True
        features = int(np.prod(task.shape))
        self.weights = {"fc.weight": np.zeros((task.classes, features), dtype), "fc.bias": np.zeros(task.classes, dtype)}
        self.ops = ArrayOps(np)
        self.optimizer_state = {name: rule.init(p, self.ops) for name, p in self.weights.items()}
        spared = {name for name, p in self.weights.items() if is_excluded(p.shape) and config.optim.exclude == "norms_and_biases"}
        self.rules = {name: rule.without_trust_ratio() if name in spared else rule for name in self.weights}
        self.decays = {name: 0.0 if name in spared else 1.0 for name in self.weights}

    def cache_on_device(self, source: Source) -> bool:
        return False

    def to_device(self, batch: Batch) -> Batch:
        batch = augment.augment_batch(batch)
        x = (batch["x"] / 255.0 - self.task.mean) / self.task.std  # (n, H, W, C)
        x = x.transpose(0, 3, 1, 2).reshape(len(x), math.prod(self.task.shape))  # (n, C H W), as torch flattens; n may be 0
        return batch | {"x": x.astype(self.dtype)}

    @np.errstate(over="ignore", invalid="ignore")  # the sums tell of it
    def step(self, micro: Sequence[Batch], hyper: Hyper, seed: int) -> Sums:
        gradient = np.zeros(sum(p.size for p in self.weights.values()), self.dtype)
        total: Sums = {"loss": 0.0, "right": 0.0, "count": 0}
        enter = self.stopwatch.enter
        for batch in micro:
            enter("forward")
            sums, error = self._forward(batch, self.config.model.label_smoothing)
            enter("backward")
            if "w" in batch:
                error = error * batch["w"][:, None]
            if not math.isfinite(sums["loss"]):  # weights that are not finite make such a gradient by themselves
                error = np.full_like(error, np.nan)  # which the reduction brings to every rank
            error = error / hyper.batch  # a sum over ranks is then the mean over the global batch
            gradient += np.concatenate([(error.T @ batch["x"]).ravel(), error.sum(0)])
            total = {name: total[name] + sums[name] for name in total}
        enter("communication")
        mean = self.communicator.allreduce(gradient, "gradient.0")
        enter("update")
        bad = not np.isfinite(mean).all()
        if not (bad and self.skips):
            self._update(mean, hyper, seed)
        enter("")
        return total | {"nonfinite": bad / self.communicator.size}

    def sync_buffers(self, communicator: Communicator) -> None:
        pass  # nothing is gathered beside the weights

    def evaluate(self, batch: Batch) -> Sums:
        return self._forward(batch)[0]

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self.views()}

    def views(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from ((f"p.{name}", p) for name, p in self.weights.items())
        yield from (
            (f"s.{name}.{i}", slot) for name, optimizer_state in self.optimizer_state.items() for i, slot in enumerate(optimizer_state)
        )

    def state_dict_names(self) -> dict[str, str]:
        return plain_names(name for name, _ in self.views())

    def load(self, state: Arrays) -> None:
        check_fit(self.state(), state)
        for name, optimizer_state in self.optimizer_state.items():
            self.weights[name] = state[f"p.{name}"].astype(self.dtype)
            self.optimizer_state[name] = tuple(state[f"s.{name}.{i}"].astype(self.dtype) for i in range(len(optimizer_state)))

    def describe(self) -> str:
        parameters = sum(p.size for p in self.weights.values())
        return f"linear, {parameters:,} parameters, numpy {self.dtype} on the CPU, gradients by one allreduce"

    def gpu(self) -> None:
        return None

    def profile(self, path: Path) -> NoReturn:
        raise NotImplementedError(f"numpy has no profiler to write {path}")  # refused before

    def _forward(self, batch: Batch, smoothing: float = 0.0) -> tuple[Sums, np.ndarray]:
        """Sums over the batch, and d(sum of losses) / d(logits), both (n, classes)-shaped inside."""
        logits = batch["x"] @ self.weights["fc.weight"].T + self.weights["fc.bias"]
        loss, error = self._loss(logits, batch["y"], smoothing)
        if "share" in batch:
            loss2, error2 = self._loss(logits, batch["y2"], smoothing)
            share = batch["share"].astype(self.dtype)
            loss, error = share * loss + (1 - share) * loss2, share[:, None] * error + (1 - share)[:, None] * error2
        right = (logits.argmax(1) == batch["y"]).sum()
        return {"loss": float(loss.sum()), "right": float(right), "count": len(logits)}, error

    def _loss(self, logits: np.ndarray, labels: np.ndarray, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
        """Each sample's loss (n,), and d(loss) / d(logits) (n, classes)."""
        one_hot = np.eye(self.task.classes, dtype=self.dtype)[labels] * (1.0 - smoothing) + smoothing / self.task.classes
        if self.config.model.loss == "squared_error":
            error = logits - one_hot
            return 0.5 * np.square(error).sum(1), error
        shifted = logits - logits.max(1, keepdims=True, initial=-np.inf)
        log_softmax = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        return -(log_softmax * one_hot).sum(1), np.exp(log_softmax) - one_hot

    def _update(self, gradient: np.ndarray, hyper: Hyper, seed: int) -> None:
        parts = np.split(gradient, np.cumsum([p.size for p in self.weights.values()])[:-1])
        parts = clip(parts, self.config.optim.clip_norm, self.config.optim.clip_value, np)
        random = np.random.default_rng(seed)
        for (name, p), g in zip(self.weights.items(), parts, strict=True):
            if hyper.noise:
                g = g + random.normal(0.0, hyper.noise**0.5, g.shape)  # noqa: PLW2901 (the same on every rank, since the seed is)
            h = hyper._replace(weight_decay=hyper.weight_decay * self.decays[name])
            new, optimizer_state = self.rules[name].update(
                g.astype(self.dtype).reshape(p.shape), self.optimizer_state[name], p, h, self.ops
            )
            self.weights[name], self.optimizer_state[name] = new.astype(self.dtype), optimizer_state


def build(config: Config, provenance: Provenance, task: Task, communicator: Communicator) -> Learner:
    """The learner of framework=numpy: model.name=linear, which train/conflicts.py has made sure of."""
    return NumpyLearner(config, task, build_rule(config, provenance), communicator, plain_dtype(config))


def shapes(config: Config, provenance: Provenance, task: Task) -> dict[str, tuple[int, ...]]:
    """The parameters by name, as build() makes them, without their memory."""
    return {"fc.weight": (task.classes, math.prod(task.shape)), "fc.bias": (task.classes,)}
