"""Images or other numbers, each sample of one of several classes: cross-entropy or squared error, and accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from hvdtrain.config.schema import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, ratio
from hvdtrain.data.source import Field, LabelledImages, Source
from hvdtrain.errors import UserError
from hvdtrain.tasks.classification.labels import LabelledPart, check_fields, classes_of, number_of_classes
from hvdtrain.tasks.inputs.transform import Transform, check_stats, input_stats, is_image
from hvdtrain.tasks.task import Each, NumpyPart, Part, Place, is_users_model

_MOST = 2**26  # values of an image, and classes: more than any data set has
_MOST_LABEL = 2**31  # of task.ignore_label: labels are int32 in JAX


@dataclass(frozen=True)
class Classification:
    """Images in, one of `classes` labels out; model.loss and model.label_smoothing say what is learned from.

    Images are uint8 (H, W, C); floats (C, H, W) are what torchvision's transforms make of images.
    """

    shape: tuple[int, ...]  # (H, W, C) of images
    classes: int
    mean: np.ndarray  # float64, of Transform: the model gets (x - mean) / std, of images (x / 255 - mean) / std
    std: np.ndarray
    dtype: str = "uint8"  # of x
    ignored: int | None = None  # label of samples without a class, of PartlyLabelled

    name = "classification"
    metrics = (
        Metric("loss", ratio("loss", "count"), "min"),
        Metric("accuracy", ratio("right", "count"), "max", column="acc", percent=True),
    )
    objective = "accuracy"
    sums = MappingProxyType({"loss": 0, "right": 0})
    sample_weight: ClassVar[int | None] = 1

    @property
    def fields(self) -> dict[str, Field]:
        return {"x": Field(self.dtype, self.shape), "y": Field("int64", (), self.classes, self.ignored)}

    @property
    def is_of_images(self) -> bool:
        return is_image(Field(self.dtype, self.shape))

    @property
    def transform(self) -> Transform:
        return Transform(Field(self.dtype, self.shape), self.mean, self.std)

    @property
    def sizes(self) -> dict[str, Any]:
        """`shape` is (H, W, C) of floats (C, H, W) too."""
        shape = self.shape or (1,)
        if len(shape) == 3 and not self.is_of_images:
            shape = (*shape[1:], shape[0])
        return {"shape": shape, "classes": self.classes, "outputs": self.classes}

    @property
    def summary(self) -> str:
        dtype = "" if self.is_of_images else f" {self.dtype}"
        return f"{'x'.join(map(str, self.shape)) or '1'}{dtype}, {self.classes:,} class{'es' * (self.classes > 1)}"

    def weight(self, batch: Batch) -> int:
        return len(batch["y"])

    def facts(self) -> dict[str, Any]:
        facts = {"shape": list(self.shape), "classes": self.classes, "mean": self.mean.tolist(), "std": self.std.tolist()}
        return facts if self.is_of_images else facts | {"dtype": self.dtype}

    def outputs(self, samples: int) -> str:
        return f"logits ({samples}, {self.classes})"

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        """A model may have more outputs than there are classes."""
        return len(found) == 2 and found[0] == samples and found[1] >= self.classes

    def torch(self, model: ModelConfig, place: Place) -> Part:
        from hvdtrain.tasks.classification.torch import TorchClassification
        from hvdtrain.tasks.inputs.torch import TorchInputs

        inputs = TorchInputs(self.transform, place, is_users_model(model))
        return TorchClassification(inputs, squared_error=model.loss == "squared_error", smoothing=model.label_smoothing)

    def jax(self, model: ModelConfig, place: Place) -> Part:
        from hvdtrain.tasks.classification.jax import JaxClassification
        from hvdtrain.tasks.inputs.jax import JaxInputs

        users_model = is_users_model(model)
        return JaxClassification(
            JaxInputs(self.transform, place, users_model),
            squared_error=model.loss == "squared_error",
            smoothing=model.label_smoothing,
            turned=len(self.shape) == 3 and not self.is_of_images and not users_model,
        )

    def numpy(self, model: ModelConfig, place: Place) -> NumpyPart:

        return NumpyClassification(
            self.transform, self.classes, place, squared_error=model.loss == "squared_error", smoothing=model.label_smoothing
        )


@dataclass(frozen=True)
class PartlyLabelled(Classification):
    """Classification of sets in which some samples have no class; loss and metrics are means over the others."""

    metrics = (
        Metric("loss", ratio("loss", "labelled"), "min"),
        Metric("accuracy", ratio("right", "labelled"), "max", column="acc", percent=True),
    )
    sums = MappingProxyType({"loss": 0, "right": 0, "labelled": 0})
    counted = "labelled"  # the sum that metrics are means over, in place of "count"
    sample_weight: ClassVar[int | None] = None

    def weight(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch["y"] != self.ignored))

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "ignore_label": self.ignored}

    def torch(self, model: ModelConfig, place: Place) -> Part:
        return LabelledPart(super().torch(model, place), self.ignored)

    def jax(self, model: ModelConfig, place: Place) -> Part:
        return LabelledPart(super().jax(model, place), self.ignored)

    def numpy(self, model: ModelConfig, place: Place) -> NumpyPart:
        return LabelledPart(super().numpy(model, place), self.ignored)


def build(
    name: str,
    train: Source,
    val: Source,
    where: str,
    users_model: bool = False,
    *,
    standardize: bool | None = None,
    ignore_label: int | None = None,
) -> Classification:
    """The task of both sets.

    standardize: true: (x - mean) / std of the training set, by the last axis; false: x as it is; default: docs/tasks.md
    ignore_label: label of samples without a class, as -1 or -100, which are in no loss, metric or count (none: every label is a class)

    Raises UserError where the data have no x with labels y, their number of classes is not known, or the sets do not fit each other.
    """
    if ignore_label is not None and abs(ignore_label) >= _MOST_LABEL:
        raise UserError(f"task.ignore_label={ignore_label} is no label", "task.ignore_label", "a number of 32 bits, as -1 or 255")
    for source in (train, val):
        if not isinstance(source, LabelledImages):
            check_fields(source, where)
    x, classes = train.fields["x"], number_of_classes(train, val, ignore_label, where)
    counts = [(source.fields["x"], classes_of(source, ignore_label)) for source in (train, val)]
    if x[:2] != val.fields["x"][:2] or counts[1][1] > classes:
        found = [f"{kind.shape} with {count} classes" for kind, count in counts]
        what = f"training images are {found[0]}, validation images {found[1]}"
        if not is_image(x) or not is_image(val.fields["x"]):
            found = [f"x {kind} with {count} classes" for kind, count in counts]
            what = f"training samples are {found[0]}, validation samples {found[1]}"
        raise UserError(what, where, "both sets need the same shape (H, W, C) and the same classes")
    mean, std = input_stats(train, standardize, users_model)
    return _of_kind(ignore_label)(x.shape, classes, mean, std, x.dtype, ignore_label)


def _of_kind(ignored: int | None) -> type[Classification]:
    return Classification if ignored is None else PartlyLabelled


def restore(facts: dict[str, Any]) -> Classification:
    """The task of Classification.facts(). Raises KeyError, TypeError, ValueError or OverflowError where they are missing or impossible."""
    shape, classes, dtype = tuple(facts["shape"]), facts["classes"], np.dtype(facts.get("dtype", "uint8")).name
    mean, std = np.array(facts["mean"], np.float64), np.array(facts["std"], np.float64)
    images = is_image(Field(dtype, shape))
    if not _are_counts([*shape, classes]) or (dtype == "uint8" and "dtype" not in facts and not images) or math.prod(shape) > _MOST:
        raise ValueError("impossible shape or classes")
    check_stats(Field(dtype, shape), mean, std)
    ignored = facts.get("ignore_label")
    if not (ignored is None or (type(ignored) is int and abs(ignored) < _MOST_LABEL)):
        raise ValueError("impossible ignore_label")
    return _of_kind(ignored)(shape, classes, mean, std, dtype, ignored)


def without_statistics(shape: tuple[int, int, int], classes: int, ignored: int | None = None) -> Classification:
    """A task for models that are only described: mean 0, deviation 1."""
    return _of_kind(ignored)(shape, classes, np.zeros(shape[2]), np.ones(shape[2]), ignored=ignored)


def _are_counts(values: list[Any]) -> bool:
    return all(type(value) is int and 1 <= value <= _MOST for value in values)


class NumpyClassification:
    """The oracle of the other frameworks, with its gradient written by hand.

    Images are uint8 (n, H, W, C), flattened as torch does, other numbers (n, ...); logits (n, classes).
    """

    where = staticmethod(np.where)  # of this framework

    def __init__(self, transform: Transform, classes: int, place: Place, *, squared_error: bool, smoothing: float) -> None:
        self._transform, self._classes, self._dtype = transform, classes, place.dtype
        self._squared_error, self._smoothing = squared_error, smoothing

    def inputs(self, batch: Batch) -> np.ndarray:
        """(n, C H W) in the learner's number type; n may be 0."""
        return self._transform.flat(batch["x"], self._dtype)

    def each(self, outputs: np.ndarray, batch: Batch, training: bool) -> Each:
        smoothing = self._smoothing if training else 0.0
        loss, _ = self._of_labels(outputs, batch["y"], smoothing)
        if "mixup_weight" in batch:
            weight = batch["mixup_weight"].astype(self._dtype)
            loss = weight * loss + (1 - weight) * self._of_labels(outputs, batch["partner_y"], smoothing)[0]
        return Each(loss, {"right": outputs.argmax(1) == batch["y"]})

    def gradient(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        """(n, classes), in training."""
        error = self._of_labels(outputs, batch["y"], self._smoothing)[1]
        if "mixup_weight" in batch:
            weight = batch["mixup_weight"].astype(self._dtype)
            error = weight[:, None] * error + (1 - weight)[:, None] * self._of_labels(outputs, batch["partner_y"], self._smoothing)[1]
        return error

    def _of_labels(self, logits: np.ndarray, labels: np.ndarray, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
        """Each sample's loss (n,), and d(loss) / d(logits) (n, classes)."""
        target = np.eye(self._classes, dtype=self._dtype)[labels] * (1.0 - smoothing) + smoothing / self._classes
        if self._squared_error:
            error = logits - target
            return 0.5 * np.square(error).sum(1), error
        shifted = logits - logits.max(1, keepdims=True, initial=-np.inf)
        log_softmax = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        return -(log_softmax * target).sum(1), np.exp(log_softmax) - target
