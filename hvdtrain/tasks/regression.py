"""Prediction of one or several numbers per sample: mean squared error, mean absolute error, R2."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, Sums
from hvdtrain.data.field import Channels, Field
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.tasks.channel_metrics import channel_names, mse_of_channel, names_of_facts
from hvdtrain.tasks.maps import (
    CHANNELS,
    FIX,
    Maps,
    axis_of_channels,
    maps_of,
    maps_of_facts,
    notes_on_layout,
    takes_maps,
)
from hvdtrain.tasks.point_weights import note_on_weights, point_weights, weights_of_facts
from hvdtrain.tasks.points import Points, RegressionLoss
from hvdtrain.tasks.task import (
    DeviceAndDtype,
    Each,
    NumpyPart,
    Task,
    TaskPart,
    find_field,
    is_users_model,
)
from hvdtrain.tasks.transform import (
    ColumnStats,
    Transform,
    axis_of_facts,
    check_stats,
    column_stats,
    facts_of_axis,
    facts_of_fill,
    fill_of_facts,
    input_stats,
    is_scaled,
    stats_axis,
)

Objective = Literal["loss", "mse", "mae", "r2"]
_LARGE = 100.0  # of targets
_MOST = 2**26  # limit for the numbers of a field: more than any data set has


@dataclass(frozen=True)
class Regression(Task):
    """Predicts the numbers of a field y from a field x."""

    x: Field
    y: Field
    mean: np.ndarray  # float64, of Transform: the model gets (x - mean) / std
    std: np.ndarray
    # float64 (channels,), the mean of y; R2 uses differences from it, so large targets lose no
    # digits
    target_mean: np.ndarray
    loss: RegressionLoss = "squared_error"
    objective: Objective = "loss"
    maps: Maps | None = None  # None: y is a row of outputs
    axis: Channels = "last"  # of x, that mean and std belong to
    notes: tuple[str, ...] = ()
    fill: np.ndarray | None = None  # what replaces NaN in x, of each channel along `axis`
    weights: np.ndarray | None = None  # of Points
    channel_names: tuple[str, ...] = ()  # of the metrics of each channel; none: there are none

    name = "regression"

    @property
    def sample_weight(self) -> int | None:
        """1; None if targets have gaps: how many numbers count is known of each batch alone."""
        return None if self.y.gaps else 1

    @property
    def fields(self) -> dict[str, Field]:
        return {"x": self.x, "y": self.y}

    @property
    def size(self) -> int:
        """The number of values to predict for a sample."""
        return math.prod(self.y.shape)

    @property
    def points(self) -> Points:
        return Points(self.y.shape, self.maps, self.loss, self.y.gaps, self.weights)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of models. Maps also have `map_shape`, (H, W, C) of x, and `pixel_outputs`, the
        channels of y."""
        sizes = {"shape": self.x.shape or (1,), "outputs": self.size}
        if self.maps is None:
            return sizes
        return {
            **sizes,
            "map_shape": self.maps.map_shape,
            "pixel_outputs": self.maps.y.channel_count,
        }

    @property
    def map_names(self) -> tuple[str, ...]:
        count = 0 if self.maps is None else self.maps.y.channel_count
        numbers = tuple(f"channel {number + 1}" for number in range(count))
        return (self.channel_names if count else ()) or numbers

    def as_maps(self, values: np.ndarray) -> np.ndarray:
        assert self.maps is not None
        return self.maps.channels_first(values)

    def why_without(self, size: str) -> tuple[str, str]:
        if size not in ("map_shape", "pixel_outputs"):
            return super().why_without(size)
        return f"x {self.x} and y {self.y} are not maps of the same points", FIX

    @property
    def summary(self) -> str:
        shape = "x".join(map(str, self.x.shape)) or "1"
        if self.maps is not None:
            of_y = "x".join(map(str, self.y.shape))
            return f"{shape} {self.x.dtype} -> {of_y} {self.y.dtype}, {self.maps.words}"
        return (
            f"{shape} {self.x.dtype}, {self.size:,} number{'s' if self.size > 1 else ''} to predict"
        )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        points = self.points
        return (
            Metric("loss", functools.partial(mean_of, "loss", points), "min"),
            Metric("mse", functools.partial(mean_of, "squares", points), "min"),
            Metric("mae", functools.partial(mean_of, "absolute", points), "min"),
            Metric("r2", functools.partial(r2, points=points), "max"),
            *(
                Metric(f"mse_{name}", functools.partial(mse_of_channel, number, points), "min")
                for number, name in enumerate(self.channel_names)
            ),
        )

    @property
    def sums(self) -> dict[str, int]:
        return self.points.sums

    def weight(self, batch: Batch) -> float:
        """The number of samples; with gaps the weights of their numbers that are not NaN."""
        y = batch["y"]
        return self.points.count(y) if self.y.gaps else len(y)

    def facts(self) -> dict[str, Any]:
        facts = {
            "x": [self.x.dtype, list(self.x.shape)],
            "y": [self.y.dtype, list(self.y.shape)],
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "target_mean": self.target_mean.tolist(),
            "loss": self.loss,
            "objective": self.objective,
        }
        of_maps = {} if self.maps is None else {"channels": self.maps.facts}
        of_y: dict[str, Any] = {"missing_y": True} if self.y.gaps else {}
        if self.weights is not None:
            of_y["weights"] = self.weights.tolist()
        if self.channel_names:
            of_y["by_channel"] = list(self.channel_names)
        return {**facts, **of_maps, **facts_of_axis(self.axis), **facts_of_fill(self.fill), **of_y}

    def outputs(self, samples: int) -> str:
        numbers = f"numbers ({samples}, {self.size})"
        if self.maps is None:
            return numbers
        return f"maps {(samples, self.maps.y.channel_count, *self.maps.y.pixels)}, or {numbers}"

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        shapes: set[tuple[int, ...]] = {(samples, self.size)}
        if len(self.y.shape) > 1:
            shapes.add((samples, *self.y.shape))
        if self.maps is not None:
            shapes.add((samples, self.maps.y.channel_count, *self.maps.y.pixels))
        return found in shapes

    def torch(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        from hvdtrain.tasks.torch import TorchInputs, TorchRegression

        inputs = TorchInputs(self.transform, place, is_users_model(model))
        return TorchRegression(
            inputs, self.points, self.target_mean, place, of_maps=takes_maps(model, "torch")
        )

    def jax(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        inputs = place.parts.JaxInputs(self.transform, place, is_users_model(model))
        return place.parts.JaxRegression(
            inputs, self.points, self.target_mean, place, of_maps=takes_maps(model, "jax")
        )

    def numpy(self, model: ModelConfig, place: DeviceAndDtype) -> NumpyPart:
        return NumpyRegression(self.transform, self.points, self.target_mean, place)

    @property
    def transform(self) -> Transform:
        return Transform(self.x, self.mean, self.std, channels=self.axis, fill=self.fill)


def mean_of(name: str, points: Points, sums: Sums) -> float:
    """Computes the mean of a sum over samples; with gaps over their numbers that are not NaN. NaN
    if there are none."""
    count = np.sum(sums["points"]) if points.has_gaps else sums["count"]
    return float(sums[name] / count) if count else math.nan


def r2(sums: Sums, points: Points | None = None) -> float:
    """Computes 1 - (squared errors / squared distances of the targets from their mean), averaged
    over the channels or outputs; NaN if targets are constant. points: None: of one output."""
    residual, target, square = (
        np.asarray(sums[name], np.float64) for name in ("residual", "target", "target_square")
    )
    if not sums["count"]:
        return math.nan
    counts: Any = sums["count"] * (1 if points is None else points.of_channel)
    if points is not None and points.has_gaps:
        counts = np.maximum(np.asarray(sums["points"], np.float64), 1.0)
    spread = square - target**2 / counts
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
    standardize: bool | Literal["channel"] | None = None,
    channels: Literal["first", "last", "none"] | None = None,
    weights: str | tuple[float, ...] | None = None,
    by_channel: bool | tuple[str, ...] = False,
) -> Regression:
    """Builds the task for a field x of any shape and the numbers of a field y.

    loss: squared_error or absolute_error, the mean over the outputs
    objective: the metric of stop.target, checkpoint.keep_best and log.targets: loss, mse, mae
        (lower is better) or r2
    standardize: true: (x - mean) / std of the training set, by the last axis; channel: of maps, by
        channel; false: x as it is; default: docs/tasks.md
    channels: of maps x and y, first: (C, H, W); last: (H, W, C); none: (H, W); default: as the
        shapes fit each other
    weights: of the points of maps in the loss and the metrics: cos(NAME), of an array of latitudes
        in the file; NAME, an array of weights; or numbers, one for each row
    by_channel: metrics mse_NAME of each channel of y, or of each number of a row: their names, such
        as [t2m,wind]; true numbers them from 1

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
    maps = maps_of(x, y, channels) if len(y.shape) > 1 else None
    of_x = axis_of_channels(x, maps, channels)
    if channels is not None and maps is None and (standardize != "channel" or of_x is None):
        raise UserError(f"{CHANNELS}={channels} does not fit x {x} and y {y}", CHANNELS, FIX)
    axis = stats_axis(standardize, of_x)
    stats = input_stats(train, standardize, users_model, channels=of_x)
    if x.gaps and not is_scaled(x, standardize, users_model):
        axis = of_x or "last"
    fill = column_stats(train, "x", axis).mean if x.gaps else None
    mean, std = stats
    if axis == "last":
        mean, std = (np.broadcast_to(array, x.shape[-1:] or (1,)) for array in stats)
    of_targets = column_stats(train, "y", "last" if maps is None else maps.y.channels)
    target_mean = _target_mean(of_targets.mean, y, maps)
    of_points = None if weights is None else point_weights(weights, train, maps)
    notes = notes_on_layout(x, y, maps, channels)
    notes += _notes_on_scale(of_targets)
    if y.gaps:
        notes.append("data.gaps: numbers of y that are NaN are in no loss and no metric")
    if weights is not None and of_points is not None:
        notes.append(note_on_weights(weights, of_points))
    return Regression(
        x._replace(values=0),
        y._replace(values=0),
        mean,
        std,
        target_mean,
        loss,
        objective,
        maps,
        axis,
        tuple(notes),
        fill,
        of_points,
        channel_names(by_channel, math.prod(y.shape) if maps is None else maps.y.channel_count),
    )


def _notes_on_scale(y: ColumnStats) -> list[str]:
    """Returns a line for the header if the loss begins far from 1."""
    most = float(np.sqrt(y.mean**2 + y.std**2).max())
    if most < _LARGE:
        return []
    return [
        f"y has values near {most:.3g}, so its squares are near {most**2:.1e}; learning rates are "
        "meant for values near 1: (y - mean) / std in the data"
    ]


def _target_mean(mean: np.ndarray, y: Field, maps: Maps | None) -> np.ndarray:
    """Returns float64 (channels,): of each channel of maps, else of each output, by the last
    axis."""
    if maps is not None:
        return mean
    return np.broadcast_to(mean, (math.prod(y.shape[:-1]), len(mean))).reshape(-1)


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
    axis = axis_of_facts(facts)
    check_stats(x, mean, std, axis)
    fill = fill_of_facts(facts, x, axis)
    if facts.get("missing_y", False) not in (True, False):
        raise ValueError("impossible gaps")
    x = x._replace(gaps=fill is not None)
    y = y._replace(gaps=bool(facts.get("missing_y", False)))
    maps = maps_of_facts(x, y, facts["channels"]) if "channels" in facts else None
    expected = math.prod(y.shape) if maps is None else maps.y.channel_count
    if target_mean.shape != (expected,) or not np.isfinite(target_mean).all():
        raise ValueError("impossible mean of the targets")
    if facts["loss"] not in ("squared_error", "absolute_error") or facts["objective"] not in (
        "loss",
        "mse",
        "mae",
        "r2",
    ):
        raise ValueError("impossible loss or objective")
    return Regression(
        x,
        y,
        mean,
        std,
        target_mean,
        facts["loss"],
        facts["objective"],
        maps,
        axis,
        fill=fill,
        weights=weights_of_facts(facts["weights"], maps) if "weights" in facts else None,
        channel_names=names_of_facts(facts, expected),
    )


class NumpyRegression:
    """The reference implementation for the other frameworks, with a hand-written gradient.

    Outputs (n, outputs); targets of any shape with as many numbers. Images are uint8 (n, H, W, C),
    flattened as torch does.
    """

    def __init__(
        self, transform: Transform, points: Points, target_mean: np.ndarray, place: DeviceAndDtype
    ) -> None:
        self._transform = transform
        self._points = points
        self._target_mean = target_mean
        self._weights = points.point_weights
        self._dtype = place.dtype

    def inputs(self, batch: Batch) -> np.ndarray:
        """Returns (n, features) in the learner's dtype; n may be 0."""
        return self._transform.flat(batch["x"], self._dtype)

    def each(self, outputs: np.ndarray, batch: Batch, training: bool) -> Each:
        if outputs.shape[1:] not in ((math.prod(self._points.shape),), self._points.shape):
            what = f"the model returns {outputs.shape}, but y has the layout {self._points.shape}"
            raise UserError(what, "model.name", "end the model with maps in the layout of y")
        target = batch["y"].astype(self._dtype)
        of_y = outputs.reshape(len(outputs), *self._points.shape)
        return self._points.each(of_y, target, self._target_mean, np, self._weights)

    def gradient(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        """Returns (n, outputs), or maps in the layout of y."""
        flat = (len(outputs), math.prod(self._points.shape))
        target = batch["y"].astype(self._dtype).reshape(flat)
        error = outputs.reshape(flat) - target
        each = 2.0 * error if self._points.loss == "squared_error" else np.sign(error)
        each = each * self._points.output_weights
        if self._points.has_gaps:
            each = np.where(np.isnan(target), 0.0, each)
        else:
            each = each / target.shape[1]
        return np.asarray(each.reshape(outputs.shape), outputs.dtype)
