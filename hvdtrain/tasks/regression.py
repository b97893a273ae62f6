"""Prediction of one or several numbers per sample: mean squared error, mean absolute error, R2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, Sums, ratio
from hvdtrain.data.field import Field
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.tasks.task import (
    DeviceAndDtype,
    Each,
    NumpyPart,
    Task,
    TaskPart,
    find_field,
    is_users_model,
)
from hvdtrain.tasks.transform import Transform, check_stats, column_stats, input_stats

Loss = Literal["squared_error", "absolute_error"]
Objective = Literal["loss", "mse", "mae", "r2"]
_MOST = 2**26  # limit for the numbers of a field: more than any data set has


@dataclass(frozen=True)
class Regression(Task):
    """Predicts the numbers of a field y from a field x."""

    x: Field
    y: Field
    mean: np.ndarray  # float64, of Transform: the model gets (x - mean) / std
    std: np.ndarray
    # float64 (outputs,), the mean of y; R2 uses differences from it, so large targets lose no
    # digits
    target_mean: np.ndarray
    loss: Loss = "squared_error"
    objective: Objective = "loss"

    name = "regression"
    sample_weight = 1

    @property
    def fields(self) -> dict[str, Field]:
        return {"x": self.x, "y": self.y}

    @property
    def size(self) -> int:
        """The number of values to predict for a sample."""
        return math.prod(self.y.shape)

    @property
    def sizes(self) -> dict[str, Any]:
        return {"shape": self.x.shape or (1,), "outputs": self.size}

    @property
    def summary(self) -> str:
        shape = "x".join(map(str, self.x.shape)) or "1"
        return (
            f"{shape} {self.x.dtype}, {self.size:,} number{'s' if self.size > 1 else ''} to predict"
        )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric("loss", ratio("loss", "count"), "min"),
            Metric("mse", ratio("squares", "count"), "min"),
            Metric("mae", ratio("absolute", "count"), "min"),
            Metric("r2", r2, "max"),
        )

    @property
    def sums(self) -> dict[str, int]:
        return {
            "loss": 0,
            "squares": 0,
            "absolute": 0,
            "residual": self.size,
            "target": self.size,
            "target_square": self.size,
        }

    def weight(self, batch: Batch) -> int:
        return len(batch["y"])

    def facts(self) -> dict[str, Any]:
        return {
            "x": [self.x.dtype, list(self.x.shape)],
            "y": [self.y.dtype, list(self.y.shape)],
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "target_mean": self.target_mean.tolist(),
            "loss": self.loss,
            "objective": self.objective,
        }

    def outputs(self, samples: int) -> str:
        return f"numbers ({samples}, {self.size})"

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        return found == (samples, self.size)

    def torch(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        from hvdtrain.tasks.torch import TorchInputs, TorchRegression

        return TorchRegression(
            TorchInputs(self.transform, place, is_users_model(model)),
            self.target_mean,
            self.loss,
            place,
        )

    def jax(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        from hvdtrain.tasks.jax import JaxInputs, JaxRegression

        return JaxRegression(
            JaxInputs(self.transform, place, is_users_model(model)),
            self.target_mean,
            self.loss,
            place,
        )

    def numpy(self, model: ModelConfig, place: DeviceAndDtype) -> NumpyPart:

        return NumpyRegression(self.transform, self.target_mean, self.loss, place)

    @property
    def transform(self) -> Transform:
        return Transform(self.x, self.mean, self.std)


def r2(sums: Sums) -> float:
    """Computes 1 - (squared errors / squared distances of the targets from their mean), averaged
    over the outputs; NaN if targets are constant."""
    residual, target, square = (
        np.asarray(sums[name], np.float64) for name in ("residual", "target", "target_square")
    )
    if not sums["count"]:
        return math.nan
    spread = square - target**2 / sums["count"]
    if not (spread > 0).all():
        return math.nan
    return float(np.mean(1.0 - residual / spread))


def build(
    name: str,
    train: Source,
    val: Source,
    where: str,
    users_model: bool = False,
    *,
    loss: Literal["squared_error", "absolute_error"] = "squared_error",
    objective: Literal["loss", "mse", "mae", "r2"] = "loss",
    standardize: bool | None = None,
) -> Regression:
    """Builds the task for a field x of any shape and the numbers of a field y.

    loss: squared_error or absolute_error, the mean over the outputs
    objective: the metric of stop.target, checkpoint.keep_best and log.targets: loss, mse, mae
        (lower is better) or r2
    standardize: true: (x - mean) / std of the training set, by the last axis; false: x as it is;
        default: docs/tasks.md

    Raises UserError if the data lack these fields, or if the sets do not match.
    """
    x = find_field(train, "x", name, where, "numbers of any shape")
    y = find_field(train, "y", name, where, "the numbers to predict")
    if names := train.class_names:
        raise UserError(
            f"{name} predicts numbers, but y contains strings: {', '.join(names[:4])}",
            where,
            "task.name=classification, with these strings as classes; or a column of numbers as y",
        )
    for field, kind in (("x", x), ("y", y)):
        other = find_field(val, field, name, where, "as in the training set")
        if other.shape != kind.shape or other.dtype != kind.dtype:
            raise UserError(
                f"{field} is {kind} in the training set, {other} in the validation set",
                where,
                "both sets need the same fields",
            )
    mean, std = (
        np.broadcast_to(array, x.shape[-1:] or (1,))
        for array in input_stats(train, standardize, users_model)
    )
    of_targets = column_stats(train, "y").mean  # along the last axis
    target_mean = np.broadcast_to(of_targets, (math.prod(y.shape[:-1]), len(of_targets))).reshape(
        -1
    )
    return Regression(
        x._replace(values=0), y._replace(values=0), mean, std, target_mean, loss, objective
    )


def restore(facts: dict[str, Any]) -> Regression:
    """Rebuilds the task from Regression.facts(). Raises KeyError, TypeError, ValueError or
    OverflowError if facts are missing or invalid."""
    x, y = (Field(np.dtype(dtype).name, tuple(shape)) for dtype, shape in (facts["x"], facts["y"]))
    if any(
        not all(type(size) is int and size >= 1 for size in field.shape)
        or math.prod(field.shape) > _MOST
        for field in (x, y)
    ):
        raise ValueError("impossible shape")
    mean, std, target_mean = (
        np.array(facts[name], np.float64) for name in ("mean", "std", "target_mean")
    )
    check_stats(x, mean, std)
    if target_mean.shape != (math.prod(y.shape),) or not np.isfinite(target_mean).all():
        raise ValueError("impossible mean of the targets")
    if facts["loss"] not in ("squared_error", "absolute_error") or facts["objective"] not in (
        "loss",
        "mse",
        "mae",
        "r2",
    ):
        raise ValueError("impossible loss or objective")
    return Regression(x, y, mean, std, target_mean, facts["loss"], facts["objective"])


class NumpyRegression:
    """The reference implementation for the other frameworks, with a hand-written gradient.

    Outputs (n, outputs); targets of any shape with as many numbers. Images are uint8 (n, H, W, C),
    flattened as torch does.
    """

    def __init__(
        self, transform: Transform, target_mean: np.ndarray, loss: str, place: DeviceAndDtype
    ) -> None:
        self._transform = transform
        self._target_mean = target_mean
        self._loss = loss
        self._dtype = place.dtype

    def inputs(self, batch: Batch) -> np.ndarray:
        """Returns (n, features) in the learner's dtype; n may be 0."""
        return self._transform.flat(batch["x"], self._dtype)

    def each(self, outputs: np.ndarray, batch: Batch, training: bool) -> Each:
        target = self._target(outputs, batch)
        squares = np.square(outputs - target)
        absolute = np.abs(outputs - target)
        loss = (squares if self._loss == "squared_error" else absolute).mean(1)
        centred = target - self._target_mean
        terms = {
            "squares": squares.mean(1),
            "absolute": absolute.mean(1),
            "residual": squares,
            "target": centred,
            "target_square": np.square(centred),
        }
        return Each(loss, terms)

    def gradient(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        """Returns (n, outputs)"""
        error = outputs - self._target(outputs, batch)
        each = 2.0 * error if self._loss == "squared_error" else np.sign(error)
        return each / outputs.shape[1]

    def _target(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        return np.asarray(batch["y"].astype(self._dtype).reshape(outputs.shape))
