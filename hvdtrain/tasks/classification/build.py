"""Images or other numbers, each sample of one of several classes: cross-entropy or squared error, and accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from hvdtrain.config.schema import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, ratio
from hvdtrain.data.source import Field, LabelledImages, Source, arrays_in_memory
from hvdtrain.errors import UserError
from hvdtrain.tasks.columns import column_stats
from hvdtrain.tasks.task import NumpyPart, Part, Place

_MOST = 2**26  # values of an image, and classes: more than any data set has


@dataclass(frozen=True)
class Classification:
    """Images in, one of `classes` labels out; model.loss and model.label_smoothing say what is learned from.

    Images are uint8 (H, W, C), normalized by channel. Numbers (columns,) are standardized by column; all else stays as the data have it:
    floats (C, H, W) are what torchvision's transforms make of images.
    """

    shape: tuple[int, ...]  # (H, W, C) of images
    classes: int
    mean: np.ndarray  # float64 (C,), of x / 255 over the training set; of columns (columns,), of all else (1,)
    std: np.ndarray  # float64 (C,), of the same; never 0
    dtype: str = "uint8"  # of x

    name = "classification"
    metrics = (
        Metric("loss", ratio("loss", "count"), "min"),
        Metric("accuracy", ratio("right", "count"), "max", column="acc", percent=True),
    )
    objective = "accuracy"
    sums = MappingProxyType({"loss": 0, "right": 0})
    sample_weight = 1

    @property
    def fields(self) -> dict[str, Field]:
        return {"x": Field(self.dtype, self.shape), "y": Field("int64", (), self.classes)}

    @property
    def is_of_images(self) -> bool:
        return is_image(Field(self.dtype, self.shape))

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

        return TorchClassification(
            self.mean,
            self.std,
            place,
            squared_error=model.loss == "squared_error",
            smoothing=model.label_smoothing,
            images=self.is_of_images,
        )

    def jax(self, model: ModelConfig, place: Place) -> Part:
        from hvdtrain.tasks.classification.jax import JaxClassification

        return JaxClassification(
            self.mean,
            self.std,
            place,
            squared_error=model.loss == "squared_error",
            smoothing=model.label_smoothing,
            images=self.is_of_images,
        )

    def numpy(self, model: ModelConfig, place: Place) -> NumpyPart:
        from hvdtrain.tasks.classification.numpy import NumpyClassification

        return NumpyClassification(
            self.mean,
            self.std,
            self.classes,
            place.dtype,
            squared_error=model.loss == "squared_error",
            smoothing=model.label_smoothing,
            images=self.is_of_images,
        )


def build(name: str, train: Source, val: Source, where: str) -> Classification:
    """The task of both sets; the statistics of the training set normalize channels and columns. It has no options.

    Raises UserError where the data have no x with labels y, their number of classes is not known, or the sets do not fit each other.
    """
    for source in (train, val):
        if not isinstance(source, LabelledImages):
            _check_fields(source, where)
    x, classes = train.fields["x"], _classes(train, val, where)
    if x[:2] != val.fields["x"][:2] or _classes_of(val) > classes:
        found = [f"{source.fields['x'].shape} with {_classes_of(source)} classes" for source in (train, val)]
        what = f"training images are {found[0]}, validation images {found[1]}"
        if not is_image(x) or not is_image(val.fields["x"]):
            found = [f"x {source.fields['x']} with {_classes_of(source)} classes" for source in (train, val)]
            what = f"training samples are {found[0]}, validation samples {found[1]}"
        raise UserError(what, where, "both sets need the same shape (H, W, C) and the same classes")
    mean, std = np.zeros(1), np.ones(1)
    if is_image(x) or len(x.shape) < 2:
        mean, std = column_stats(train, "x")
    return Classification(x.shape, classes, mean, std, x.dtype)


def is_image(x: Field) -> bool:
    return x.dtype == "uint8" and len(x.shape) == 3


def _check_fields(source: Source, where: str) -> None:
    """Raises UserError where a sample is not x with its label y."""
    y = source.fields.get("y")
    if "x" not in source.fields or y is None or y.shape or np.dtype(y.dtype).kind not in "iu":
        found = ", ".join(f"{field} {kind}" for field, kind in source.fields.items())
        what = f"task.name=classification needs x (images uint8 (H, W, C), or numbers) with integer labels y; the data have {found}"
        raise UserError(what, where, "another task.name (regression, language), or data of classes")


def _classes(train: Source, val: Source, where: str) -> int:
    """Those that the data declare; of arrays without a declaration one more than the largest label of both sets."""
    if isinstance(train, LabelledImages):
        return train.classes
    classes = train.fields["y"].values or max(_classes_of(train), _classes_of(val))
    if not all(map(_classes_of, (train, val))):
        fix = "give the Dataset an attribute `classes`: their names, or how many there are; or for numbers to predict task.name=regression"
        raise UserError("the number of classes is not known: labels are read sample by sample", where, fix)
    return classes


def _classes_of(source: Source) -> int:
    """Declared, or by the largest label; 0 where that would take reading all samples."""
    declared = source.fields["y"].values
    arrays = None if declared else arrays_in_memory(source)
    return declared if arrays is None else int(arrays["y"].max(initial=-1)) + 1


def restore(facts: dict[str, Any]) -> Classification:
    """The task of Classification.facts(). Raises KeyError, TypeError, ValueError or OverflowError where they are missing or impossible."""
    shape, classes, dtype = tuple(facts["shape"]), facts["classes"], np.dtype(facts.get("dtype", "uint8")).name
    mean, std = np.array(facts["mean"], np.float64), np.array(facts["std"], np.float64)
    images = is_image(Field(dtype, shape))
    if not _are_counts([*shape, classes]) or (dtype == "uint8" and "dtype" not in facts and not images) or math.prod(shape) > _MOST:
        raise ValueError("impossible shape or classes")
    columns = shape[-1:] if images or len(shape) == 1 else (1,)
    if not mean.shape == std.shape == columns or not np.isfinite(mean).all() or not (np.isfinite(std) & (std > 0)).all():
        raise ValueError("impossible mean or deviation")
    return Classification(shape, classes, mean, std, dtype)


def without_statistics(shape: tuple[int, int, int], classes: int) -> Classification:
    """A task for models that are only described: mean 0, deviation 1."""
    return Classification(shape, classes, np.zeros(shape[2]), np.ones(shape[2]))


def _are_counts(values: list[Any]) -> bool:
    return all(type(value) is int and 1 <= value <= _MOST for value in values)
