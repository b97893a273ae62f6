"""The class of each pixel of an image: cross-entropy over pixels and Dice, pixel accuracy, mean
intersection over union."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, Sums, ratio
from hvdtrain.data.field import Channels, Field
from hvdtrain.data.source import Source, arrays_in_memory
from hvdtrain.data.subset import Subset
from hvdtrain.errors import UserError
from hvdtrain.tasks.label_counts import notes_on_gaps
from hvdtrain.tasks.rows import Rows, rows_of_pixels
from hvdtrain.tasks.task import DeviceAndDtype, Task, TaskPart, find_field, is_users_model
from hvdtrain.tasks.transform import (
    Transform,
    axis_of_facts,
    check_stats,
    facts_of_axis,
    input_stats,
    is_image,
    stats_axis,
    without_stats,
)

Objective = Literal["loss", "accuracy", "mean_iou"]
_MOST = 2**26  # limit for the pixels of an image
_MOST_CLASSES = 1000  # limit for classes: their confusion matrix has 8 MB
_OPTION = "task.ignore_label"


def pixel_accuracy(sums: Sums) -> float:
    """Computes the share of correctly classified pixels among pixels with a class; NaN if there are
    none."""
    confusion = np.asarray(sums["confusion"], np.float64)
    size = math.isqrt(len(confusion))
    return (
        float(np.trace(confusion.reshape(size, size)) / sums["pixels"])
        if sums["pixels"]
        else math.nan
    )


def mean_iou(sums: Sums) -> float:
    """Computes the mean intersection over union of the classes that occur in labels or predictions;
    NaN without any pixel."""
    if not sums["pixels"]:
        return math.nan
    found = iou_of_classes(np.asarray(sums["confusion"], np.float64))
    return float(np.mean(found[~np.isnan(found)]))


def iou_of_classes(confusion: np.ndarray) -> np.ndarray:
    """Returns float64 (classes,): intersection over union, from counts (classes ** 2,) by [label,
    prediction]; NaN for a class in neither."""
    size = math.isqrt(len(confusion))
    matrix = confusion.reshape(size, size)
    both = np.diagonal(matrix)
    union = matrix.sum(0) + matrix.sum(1) - np.diagonal(matrix)
    return np.where(union > 0, both / np.maximum(union, 1.0), np.nan)


@dataclass(frozen=True)
class Segmentation(Task):
    """Predicts one of `classes` classes for each pixel of an image x; pixels with the label
    `ignored` are excluded from loss and metrics."""

    x: Field  # uint8 (H, W, C), or floats (C, H, W)
    classes: int
    mean: np.ndarray  # float64, of Transform
    std: np.ndarray
    ignored: int | None = None
    dice: float = 0.0  # weight of the Dice term in the loss
    objective: Objective = "mean_iou"
    # factors of the cross-entropy of pixels, by class
    class_weights: tuple[float, ...] | None = None
    axis: Channels = "last"  # of x, that mean and std belong to

    name = "segmentation"
    metrics = (
        Metric("loss", ratio("loss", "pixels"), "min"),
        Metric("accuracy", pixel_accuracy, "max", column="acc", percent=True),
        Metric("mean_iou", mean_iou, "max", column="iou", percent=True),
    )
    sample_weight: ClassVar[int | None] = (
        None  # the number of pixels that count differs between batches, and crops change it
    )

    @property
    def fields(self) -> dict[str, Field]:
        largest = max(self.classes - 1, self.ignored or 0)
        is_small = largest < 256 and (self.ignored is None or self.ignored >= 0)
        return {
            "x": self.x,
            "y": Field("uint8" if is_small else "int64", self.pixels, self.classes, self.ignored),
        }

    @property
    def pixels(self) -> tuple[int, int]:
        """(H, W)"""
        height, width = self.x.shape[:2] if is_image(self.x) else self.x.shape[1:]
        return height, width

    mask_label = "y"

    @property
    def masks(self) -> dict[str, int | None]:
        return {"y": self.ignored}

    def notes_on_data(self, train: Source, val: Source, has_given_stats: bool) -> list[str]:
        return notes_on_gaps(train, self.name, self.classes, self.ignored)

    def rows(self, is_softmax: bool, class_names: Sequence[str] | None) -> Rows:
        return rows_of_pixels()

    @property
    def sums(self) -> dict[str, int]:
        return {"loss": 0, "pixels": 0, "confusion": self.classes**2}

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of models; `shape` is (H, W, C), even for floats (C, H, W). `pixel_classes`:
        outputs of each pixel. `map_shape` and `pixel_outputs` are the same, as other tasks of maps
        have them."""
        channels = self.x.shape[2] if is_image(self.x) else self.x.shape[0]
        shape = (*self.pixels, channels)
        of_maps = {"map_shape": shape, "pixel_outputs": self.classes}
        return {"shape": shape, "pixel_classes": self.classes, **of_maps}

    @property
    def transform(self) -> Transform:
        return Transform(self.x, self.mean, self.std, channels=self.axis)

    @property
    def summary(self) -> str:
        return (
            f"{'x'.join(map(str, self.x.shape))} {self.x.dtype}, {self.classes:,} "
            f"class{'es' if self.classes > 1 else ''} of pixels"
        )

    def weight(self, batch: Batch) -> int:
        """Returns the number of pixels that have a class."""
        y = batch["y"]
        return int(y.size if self.ignored is None else np.count_nonzero(y != self.ignored))

    def facts(self) -> dict[str, Any]:
        of_x = {
            "x": [self.x.dtype, list(self.x.shape)],
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }
        facts = of_x | {
            "classes": self.classes,
            "ignore_label": self.ignored,
            "dice": self.dice,
            "objective": self.objective,
            **facts_of_axis(self.axis),
        }
        return (
            facts
            if self.class_weights is None
            else facts | {"class_weights": list(self.class_weights)}
        )

    def outputs(self, samples: int) -> str:
        return f"logits {(samples, self.classes, *self.pixels)}"

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        return found == (samples, self.classes, *self.pixels)

    def torch(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        from hvdtrain.extras.maps.torch_part import TorchSegmentation
        from hvdtrain.tasks.torch import TorchInputs

        inputs = TorchInputs(self.transform, place, is_users_model(model))
        return TorchSegmentation(
            inputs, self.classes, self.ignored, self.dice, self.class_weights, place
        )

    def jax(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        inputs = place.parts.JaxInputs(self.transform, place, is_users_model(model))
        turned = not is_image(self.x)
        return place.parts.JaxSegmentation(
            inputs,
            self.classes,
            self.pixels,
            self.ignored,
            self.dice,
            self.class_weights,
            turned=turned,
        )


def build(
    name: str,
    train: Source,
    val: Source,
    where: str,
    users_model: bool = False,
    *,
    classes: int | None = None,
    ignore_label: int | None = None,
    dice: float = 0.0,
    objective: Literal["loss", "accuracy", "mean_iou"] = "mean_iou",
    class_weights: tuple[float, ...] | None = None,
    standardize: bool | Literal["channel"] | None = None,
) -> Segmentation:
    """Builds the task for images x and masks y (H, W) of class numbers.

    classes: the number of classes (none: the largest number in masks that are in memory plus one)
    ignore_label: label of pixels without a class, such as 255 or -1; they are excluded from loss
        and metrics (none: every number is a class)
    dice: weight of the Dice term that is added to the cross-entropy, such as 0.5; 0: without it
    objective: the metric of stop.target, checkpoint.keep_best and log.targets: loss, accuracy,
        mean_iou
    class_weights: factor of a pixel's cross-entropy, for each class (none: 1)
    standardize: true: (x - mean) / std of the training set, by the last axis; channel: by channel;
        false: x as it is; default: docs/tasks.md

    Raises UserError if the data are not images with masks, the number of classes is unknown, or the
    sets do not match.
    """
    x = find_field(train, "x", name, where, "images uint8 (H, W, C) or floats (C, H, W)")
    y = find_field(train, "y", name, where, "masks of integers (H, W)")
    for field, kind in (("x", x), ("y", y)):
        other = find_field(val, field, name, where, "as in the training set")
        if other.shape != kind.shape or other.dtype != kind.dtype:
            what = f"{field} is {kind} in the training set, {other} in the validation set"
            raise UserError(what, where, "both sets need the same fields")
    _check_shapes(x, y, where)
    if not (math.isfinite(dice) and dice >= 0):
        raise UserError(f"task.dice={dice}", "task.dice", "0 or more, such as 0.5")
    if ignore_label is not None and abs(ignore_label) >= 2**31:
        raise UserError(
            f"{_OPTION}={ignore_label} is not a label",
            _OPTION,
            "a 32-bit integer, such as -1 or 255",
        )
    count = classes or _classes((train, val), ignore_label, where)
    if not 2 <= count <= _MOST_CLASSES:
        what = f"{count:,} classes of pixels are not supported, only 2 to {_MOST_CLASSES:,}"
        raise UserError(
            what,
            "task.classes" if classes else where,
            f"{_OPTION}=255 if masks have 255 on pixels without a class",
        )
    _check_weights(class_weights, count)
    channels: Channels = "last" if is_image(x) else "first"
    mean, std = input_stats(train, standardize, users_model, channels=channels)
    axis = stats_axis(standardize, channels)
    weights = None if class_weights is None else tuple(map(float, class_weights))
    return Segmentation(
        x._replace(values=0), count, mean, std, ignore_label, dice, objective, weights, axis
    )


def _check_weights(weights: Sequence[float] | None, classes: int) -> None:
    """Raises UserError if there is not one weight for each class, or a weight is invalid."""
    if weights is None or (_are_weights(weights) and len(weights) == classes):
        return
    what = f"task.class_weights has {len(weights)} weights, for {classes} classes of pixels"
    what = what if len(weights) != classes else f"task.class_weights={[*weights]}"
    raise UserError(
        what, "task.class_weights", "one number of 0 or more for each class, not all 0: [1.0,2.5]"
    )


def _are_weights(weights: Sequence[float]) -> bool:
    return all(math.isfinite(weight) and weight >= 0 for weight in weights) and any(weights)


def _check_shapes(x: Field, y: Field, where: str) -> None:
    """Raises UserError unless x is an image and y a mask of its pixels."""
    if len(x.shape) != 3 or not (is_image(x) or np.dtype(x.dtype).kind == "f"):
        fix = (
            "x[..., None] of grey images"
            if len(x.shape) == 2
            else "images uint8 (n, H, W, C), or floats (n, C, H, W)"
        )
        raise UserError(f"task.name=segmentation needs images x; x is {x}", where, fix)
    pixels = x.shape[:2] if is_image(x) else x.shape[1:]
    if y.shape != pixels or np.dtype(y.dtype).kind not in "iub":
        if y.shape == (1, *pixels):
            fix = "y[:, 0]"
        elif y.shape == (*pixels, 1):
            fix = "y[..., 0]"
        else:
            fix = "one integer for each pixel"
        raise UserError(
            f"task.name=segmentation needs masks y {pixels} of integers; y is {y}", where, fix
        )


def _classes(sources: tuple[Source, Source], ignored: int | None, where: str) -> int:
    """Returns the largest number in the masks plus one. Raises UserError if they are not in
    memory."""
    declared = max(source.fields["y"].values for source in sources)
    if declared:
        return declared
    largest = -1
    for source in sources:
        own = without_stats(source)
        whole = own.source if isinstance(own, Subset) else own
        arrays = arrays_in_memory(whole)
        if arrays is None:
            what = "the number of classes is not known: masks are read sample by sample"
            raise UserError(what, where, "task.classes=N")
        for start in range(0, len(whole), 256):
            numbers = arrays["y"][start : start + 256]
            numbers = numbers if ignored is None else numbers[numbers != ignored]
            largest = max(largest, int(numbers.max()) if numbers.size else -1)
    return largest + 1


def restore(facts: dict[str, Any]) -> Segmentation:
    """Rebuilds the task from Segmentation.facts(). Raises KeyError, TypeError, ValueError or
    OverflowError if facts are missing or invalid."""
    dtype, shape = facts["x"]
    x = Field(np.dtype(dtype).name, tuple(shape))
    ignored = facts["ignore_label"]
    dice = facts["dice"]
    if (
        len(x.shape) != 3
        or not all(type(size) is int and size >= 1 for size in x.shape)
        or math.prod(x.shape) > _MOST
    ):
        raise ValueError("impossible shape")
    if (
        type(facts["classes"]) is not int
        or not 2 <= facts["classes"] <= _MOST_CLASSES
        or facts["objective"] not in get_args(Objective)
    ):
        raise ValueError("impossible classes or objective")
    if not (ignored is None or (type(ignored) is int and abs(ignored) < 2**31)) or not (
        math.isfinite(dice) and dice >= 0
    ):
        raise ValueError("impossible ignore_label or dice")
    weights = facts.get("class_weights")
    if weights is not None and not (_are_weights(weights) and len(weights) == facts["classes"]):
        raise ValueError("impossible class_weights")
    mean, std = (np.array(facts[name], np.float64) for name in ("mean", "std"))
    axis = axis_of_facts(facts)
    check_stats(x, mean, std, axis)
    return Segmentation(
        x,
        facts["classes"],
        mean,
        std,
        ignored,
        float(dice),
        facts["objective"],
        weights and tuple(map(float, weights)),
        axis,
    )
