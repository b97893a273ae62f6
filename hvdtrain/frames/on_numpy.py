"""The numpy frame: softmax regression and linear least squares by hand-written gradients, the oracle of every other frame."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.comm.engine import Engine
from hvdtrain.config import Config
from hvdtrain.configure import Origins
from hvdtrain.errors import UserError
from hvdtrain.frames.learner import Learner, Task, build_rule, check_fit
from hvdtrain.optim.rule import Rule
from hvdtrain.state import Arrays, Batch, Hyper, Sums


class NumpyLearner:
    """logits = x W' + b from zero weights; names and shapes are those of models/linear.py."""

    def __init__(self, task: Task, squared_error: bool, rule: Rule, dtype: np.dtype, engine: Engine) -> None:
        self.task, self.squared_error, self.rule, self.dtype, self.engine = task, squared_error, rule, dtype, engine
        features = int(np.prod(task.shape))
        self.weights = {"fc.weight": np.zeros((task.classes, features), dtype), "fc.bias": np.zeros(task.classes, dtype)}
        self.slots = {name: rule.init(p, np) for name, p in self.weights.items()}

    def put(self, batch: Batch) -> Batch:
        x = (batch["x"] / 255.0 - self.task.mean) / self.task.std  # (n, H, W, C)
        x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)  # (n, C H W), as torch flattens
        return {"x": x.astype(self.dtype), "y": batch["y"]}

    def step(self, micro: Sequence[Batch], hyper: Hyper, seed: int) -> Sums:
        gradient = np.zeros(sum(p.size for p in self.weights.values()), self.dtype)
        total: Sums = {"loss": 0.0, "right": 0.0, "count": 0}
        for batch in micro:
            sums, error = self._forward(batch)
            error = error / hyper.batch  # a sum over ranks is then the mean over the global batch
            gradient += np.concatenate([(error.T @ batch["x"]).ravel(), error.sum(0)])
            total = {name: total[name] + sums[name] for name in total}
        self._update(self.engine.allreduce(gradient, "gradient.0"), hyper)
        return total

    def settle(self, engine: Engine) -> None:
        pass  # nothing is gathered beside the weights

    def evaluate(self, batch: Batch) -> Sums:
        return self._forward(batch)[0]

    def state(self) -> Arrays:
        arrays = {f"p.{name}": p.copy() for name, p in self.weights.items()}
        return arrays | {f"s.{name}.{i}": slot.copy() for name, slots in self.slots.items() for i, slot in enumerate(slots)}

    def load(self, state: Arrays) -> None:
        check_fit(self.state(), state)
        for name, slots in self.slots.items():
            self.weights[name] = state[f"p.{name}"].astype(self.dtype)
            self.slots[name] = tuple(state[f"s.{name}.{i}"].astype(self.dtype) for i in range(len(slots)))

    def describe(self) -> str:
        parameters = sum(p.size for p in self.weights.values())
        return f"linear, {parameters:,} parameters, numpy {self.dtype} on the CPU, gradients by one allreduce"

    def _forward(self, batch: Batch) -> tuple[Sums, np.ndarray]:
        """Sums over the batch, and d(sum of losses) / d(logits), both (n, classes)-shaped inside."""
        logits = batch["x"] @ self.weights["fc.weight"].T + self.weights["fc.bias"]
        one_hot = np.eye(self.task.classes, dtype=self.dtype)[batch["y"]]
        if self.squared_error:
            error = logits - one_hot
            loss = 0.5 * np.square(error).sum()
        else:
            shifted = logits - logits.max(1, keepdims=True, initial=-np.inf)
            log_softmax = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
            error = np.exp(log_softmax) - one_hot
            loss = -(log_softmax * one_hot).sum()
        right = (logits.argmax(1) == batch["y"]).sum()
        return {"loss": float(loss), "right": float(right), "count": len(logits)}, error

    def _update(self, gradient: np.ndarray, hyper: Hyper) -> None:
        start = 0
        for name, p in self.weights.items():
            g = gradient[start : start + p.size].reshape(p.shape)
            delta, self.slots[name] = self.rule.update(g, self.slots[name], p, hyper, np)
            self.weights[name] = p + delta
            start += p.size


def build(config: Config, origins: Origins, task: Task, engine: Engine) -> Learner:
    """The learner of frame=numpy; it knows model.name=linear alone."""
    impossible = {
        "model.name": config.model.name != "linear",
        "comm.reduce": config.comm.reduce != "auto",
        "speed.device": config.speed.device == "cuda",
    }
    for key, wrong in impossible.items():
        if wrong:
            fix = "frame=numpy takes model.name=linear, comm.reduce=auto and the CPU; or frame=torch"
            raise UserError(f"frame=numpy cannot do this {key}", origins.where(key), fix)
    dtype = np.dtype({"fp32": "float32", "fp64": "float64"}[config.speed.precision])
    return NumpyLearner(task, config.model.loss == "squared_error", build_rule(config, origins), dtype, engine)
