"""Classification of images or other numbers: cross-entropy or squared error, accuracy; labels of
two sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, ratio
from hvdtrain.data.field import Field
from hvdtrain.data.source import LabelledImages, Source
from hvdtrain.errors import UserError
from hvdtrain.tasks.label_counts import LossForm, Operations, notes_on_gaps, right_terms, softmax
from hvdtrain.tasks.labels import (
    classes_of,
    notes_on_counts,
    notes_on_labels,
    number_of_classes,
)
from hvdtrain.tasks.task import (
    DeviceAndDtype,
    Each,
    NumpyPart,
    Task,
    TaskPart,
    is_users_model,
    refuse_nothing,
)
from hvdtrain.tasks.transform import Transform, check_stats, input_stats, is_image

if TYPE_CHECKING:
    from hvdtrain.tasks.rows import Rows

_MOST = 2**26  # limit for the values of an image and for classes: more than any data set has
_MOST_LABEL = 2**31  # limit for task.ignore_label: labels are int32 in JAX
_NEEDS = "x (images uint8 (H, W, C), or numbers) with integer labels y"


def metrics_over(counted: str) -> tuple[Metric, ...]:
    """Returns the metrics loss and accuracy, as means over the sum `counted`."""
    loss = Metric("loss", ratio("loss", counted), "min")
    return loss, Metric("accuracy", ratio("right", counted), "max", column="acc", percent=True)


@dataclass(frozen=True)
class Classification(Task):
    """Images in, one of `classes` labels out; model.loss and model.label_smoothing choose the loss.

    Images are uint8 (H, W, C); floats (C, H, W) come from torchvision's transforms.
    """

    shape: tuple[int, ...]  # (H, W, C) of images
    classes: int
    # float64, of Transform: the model gets (x - mean) / std, of images (x / 255 - mean) / std
    mean: np.ndarray
    std: np.ndarray
    dtype: str = "uint8"  # of x
    ignored: int | None = None  # label of samples without a class, of PartlyLabelled
    # adds a metric: how often the class is among the top_k largest outputs
    top_k: int | None = None
    class_weights: tuple[float, ...] | None = None  # factors of the losses of samples, by class

    name = "classification"
    objective = "accuracy"
    sample_weight: ClassVar[int | None] = 1
    counted: ClassVar[str] = "count"  # the sum by which metrics are divided

    @property
    def metrics(self) -> tuple[Metric, ...]:
        top = (
            ()
            if self.top_k is None
            else (
                Metric(f"top{self.top_k}", ratio("among_top", self.counted), "max", percent=True),
            )
        )
        return (*metrics_over(self.counted), *top)

    @property
    def sums(self) -> Mapping[str, int]:
        return (
            {"loss": 0, "right": 0}
            if self.top_k is None
            else {"loss": 0, "right": 0, "among_top": 0}
        )

    @property
    def fields(self) -> dict[str, Field]:
        return {
            "x": Field(self.dtype, self.shape),
            "y": Field("int64", (), self.classes, self.ignored),
        }

    class_label = "y"

    @property
    def is_of_images(self) -> bool:
        return is_image(Field(self.dtype, self.shape))

    @property
    def transform(self) -> Transform:
        return Transform(Field(self.dtype, self.shape), self.mean, self.std)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of models; `shape` is (H, W, C), even for floats (C, H, W)."""
        shape = self.shape or (1,)
        if len(shape) == 3 and not self.is_of_images:
            shape = (*shape[1:], shape[0])
        return {"shape": shape, "classes": self.classes, "outputs": self.classes}

    @property
    def summary(self) -> str:
        dtype = "" if self.is_of_images else f" {self.dtype}"
        return (
            f"{'x'.join(map(str, self.shape)) or '1'}{dtype}, {self.classes:,} "
            f"class{'es' if self.classes > 1 else ''}"
        )

    @property
    def details(self) -> str:
        """The data in words: images of 28x28 pixels and 1 channel, 10 classes."""
        if not self.is_of_images:
            return self.summary
        height, width, channels = self.shape
        return (
            f"images of {height}x{width} pixels and {channels} "
            f"channel{'s' if channels > 1 else ''}, {self.classes:,} classes"
        )

    def notes_on_data(self, train: Source, val: Source, has_given_stats: bool) -> list[str]:
        lines = notes_on_labels(train, val, self.classes, self.ignored)
        lines += notes_on_gaps(train, self.name, self.classes, self.ignored)
        lines += notes_on_counts(train, self.classes, self.ignored, self.class_weights)
        is_grey = (
            self.is_of_images
            and self.shape[2] == 3
            and not has_given_stats
            and self.mean.any()  # zero for several inputs, which have their own transforms
            and len({*self.mean.tolist()}) == len({*self.std.tolist()}) == 1
        )
        if is_grey:
            lines.append(
                "grey images: the three channels have the same values; data.channels=1 reads one"
            )
        return lines

    def rows(self, is_softmax: bool, class_names: Sequence[str] | None) -> Rows:
        from hvdtrain.tasks.rows import rows_of_classes

        return rows_of_classes(is_softmax, class_names)

    def weight(self, batch: Batch) -> int:
        return len(batch["y"])

    def facts(self) -> dict[str, Any]:
        facts = {
            "shape": list(self.shape),
            "classes": self.classes,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }
        facts |= {} if self.is_of_images else {"dtype": self.dtype}
        facts |= {} if self.top_k is None else {"top_k": self.top_k}
        return (
            facts
            if self.class_weights is None
            else facts | {"class_weights": list(self.class_weights)}
        )

    def outputs(self, samples: int) -> str:
        return f"logits ({samples}, {self.classes})"

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        """Whether the outputs fit; a model may have more outputs than there are classes."""
        return len(found) == 2 and found[0] == samples and found[1] >= self.classes

    def torch(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        from hvdtrain.tasks.torch import TorchClassification, TorchInputs

        inputs = TorchInputs(self.transform, place, is_users_model(model))
        form = LossForm(
            model.loss == "squared_error", model.label_smoothing, self.class_weights, self.top_k
        )
        return TorchClassification(inputs, form, place)

    def jax(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        users_model = is_users_model(model)
        return place.parts.JaxClassification(
            place.parts.JaxInputs(self.transform, place, users_model),
            LossForm(
                model.loss == "squared_error", model.label_smoothing, self.class_weights, self.top_k
            ),
            turned=len(self.shape) == 3 and not self.is_of_images and not users_model,
        )

    def numpy(self, model: ModelConfig, place: DeviceAndDtype) -> NumpyPart:
        form = LossForm(
            model.loss == "squared_error", model.label_smoothing, self.class_weights, self.top_k
        )
        return NumpyClassification(self.transform, place, form)


@dataclass(frozen=True)
class PartlyLabelled(Classification):
    """Classification if some samples have no class; loss and metrics are means over the other
    samples."""

    counted: ClassVar[str] = "labelled"
    sample_weight: ClassVar[int | None] = None

    @property
    def sums(self) -> Mapping[str, int]:
        return {**super().sums, "labelled": 0}

    def weight(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch["y"] != self.ignored))

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "ignore_label": self.ignored}

    def torch(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        return LabelledPart(super().torch(model, place), self.ignored)

    def jax(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        return LabelledPart(super().jax(model, place), self.ignored)

    def numpy(self, model: ModelConfig, place: DeviceAndDtype) -> NumpyPart:
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
    top_k: int | None = None,
    class_weights: tuple[float, ...] | Literal["balanced"] | None = None,
    metrics: tuple[
        Literal[
            "auroc",
            "average_precision",
            "f1",
            "precision",
            "recall",
            "balanced_accuracy",
            "calibration_error",
        ],
        ...,
    ] = (),
    objective: str | None = None,
) -> Task:
    """Returns the task of both sets.

    standardize: true: (x - mean) / std of the training set, by the last axis; false: x as it is;
        default: docs/tasks.md
    ignore_label: label of samples without a class, such as -1 or -100; they are excluded from loss,
        metrics and counts (none: every label is a class)
    top_k: adds a metric, such as top5 with 5: how often the class of a sample is among the top_k
        largest outputs
    class_weights: factor of a sample's loss, for each class; balanced: samples / (classes x samples
        of the class)
    metrics: further metrics: auroc, average_precision, f1, precision, recall, balanced_accuracy,
        calibration_error (docs/tasks.md)
    objective: the metric of stop.target, checkpoint.keep_best and log.targets (accuracy)

    Raises UserError if the data have no x with labels y, if the number of classes is unknown, or if
    the sets do not match.
    """
    if ignore_label is not None and abs(ignore_label) >= _MOST_LABEL:
        raise UserError(
            f"task.ignore_label={ignore_label} is not a label",
            "task.ignore_label",
            "a 32-bit integer, such as -1 or 255",
        )
    for source in (train, val):
        if not isinstance(source, LabelledImages):
            check_fields(source, where)
    x = train.fields["x"]
    classes = number_of_classes(train, val, ignore_label, where)
    counts = [(source.fields["x"], classes_of(source, ignore_label)) for source in (train, val)]
    if x[:2] != val.fields["x"][:2] or counts[1][1] > classes:
        found = [f"{kind.shape} with {count} classes" for kind, count in counts]
        what = f"training images are {found[0]}, validation images {found[1]}"
        if not is_image(x) or not is_image(val.fields["x"]):
            found = [f"x {kind} with {count} classes" for kind, count in counts]
            what = f"training samples are {found[0]}, validation samples {found[1]}"
        raise UserError(what, where, "both sets need the same shape (H, W, C) and the same classes")
    mean, std = input_stats(train, standardize, users_model)
    if top_k is not None and not 2 <= top_k < classes:
        raise UserError(
            f"task.top_k={top_k} is not possible with {classes} classes",
            "task.top_k",
            f"2 to {classes - 1}, or leave it out",
        )
    weights = _weights_of_classes(class_weights, train, classes, ignore_label)
    task = _of_kind(ignore_label)(
        x.shape, classes, mean, std, x.dtype, ignore_label, top_k, weights
    )
    if not metrics and objective in (None, task.objective):
        return task
    from hvdtrain.tasks.class_metrics import with_metrics

    return with_metrics(task, metrics, objective, classes, ignore_label)


def _weights_of_classes(
    asked: tuple[float, ...] | Literal["balanced"] | None,
    train: Source,
    classes: int,
    ignored: int | None,
) -> tuple[float, ...] | None:
    """Returns one weight for each class; with balanced, their mean over the training set is 1.
    Raises UserError if they are unknown or invalid."""
    where = "task.class_weights"
    if asked == "balanced":
        labels = train.known_labels()
        if labels is None:
            raise UserError(
                "task.class_weights=balanced: labels are read sample by sample",
                where,
                "a weight for each class: [1.0,2.5]",
            )
        labels = labels if ignored is None else labels[labels != ignored]
        counts = np.bincount(labels[labels >= 0].astype(np.int64), minlength=classes)
        seen = int(np.count_nonzero(counts))
        return tuple(float(len(labels) / (seen * count)) if count else 1.0 for count in counts)
    if asked is None:
        return None
    if (
        len(asked) != classes
        or not all(math.isfinite(weight) and weight >= 0 for weight in asked)
        or not any(asked)
    ):
        what = (
            f"task.class_weights has {len(asked)} weights, for {classes} classes"
            if len(asked) != classes
            else f"{where}={[*asked]}"
        )
        raise UserError(
            what, where, "one number of 0 or more for each class; or task.class_weights=balanced"
        )
    return tuple(map(float, asked))


def _of_kind(ignored: int | None) -> type[Classification]:
    return Classification if ignored is None else PartlyLabelled


def restore(facts: dict[str, Any]) -> Task:
    """The task of Classification.facts(), also with metrics. Raises KeyError, TypeError, ValueError
    or OverflowError if they are missing or impossible."""
    shape = tuple(facts["shape"])
    classes = facts["classes"]
    dtype = np.dtype(facts.get("dtype", "uint8")).name
    mean = np.array(facts["mean"], np.float64)
    std = np.array(facts["std"], np.float64)
    images = is_image(Field(dtype, shape))
    if (
        not _are_counts([*shape, classes])
        or (dtype == "uint8" and "dtype" not in facts and not images)
        or math.prod(shape) > _MOST
    ):
        raise ValueError("impossible shape or classes")
    check_stats(Field(dtype, shape), mean, std)
    ignored = facts.get("ignore_label")
    if not (ignored is None or (type(ignored) is int and abs(ignored) < _MOST_LABEL)):
        raise ValueError("impossible ignore_label")
    top_k = facts.get("top_k")
    weights = facts.get("class_weights")
    if top_k is not None and not (type(top_k) is int and 2 <= top_k < classes):
        raise ValueError("impossible top_k")
    if weights is not None and (
        len(weights) != classes
        or not all(math.isfinite(weight) and weight >= 0 for weight in weights)
    ):
        raise ValueError("impossible class_weights")
    weights = None if weights is None else tuple(map(float, weights))
    task = _of_kind(ignored)(shape, classes, mean, std, dtype, ignored, top_k, weights)
    if "scored" not in facts:
        return task
    from hvdtrain.tasks.class_metrics import restored

    return restored(task, facts["scored"], classes, ignored)


def without_statistics(
    shape: tuple[int, int, int], classes: int, ignored: int | None = None
) -> Classification:
    """Returns a task with mean 0 and deviation 1, for models that are only described."""
    return _of_kind(ignored)(shape, classes, np.zeros(shape[2]), np.ones(shape[2]), ignored=ignored)


def _are_counts(values: list[Any]) -> bool:
    return all(type(value) is int and 1 <= value <= _MOST for value in values)


class NumpyClassification:
    """The reference implementation for the other frameworks, with a hand-written gradient.

    Images are uint8 (n, H, W, C), flattened as torch does, other numbers (n, ...); logits (n,
    outputs), at least one for each class.
    """

    where = staticmethod(np.where)  # of this framework

    def __init__(self, transform: Transform, place: DeviceAndDtype, form: LossForm) -> None:
        self._transform = transform
        self._dtype = place.dtype
        self._form = form
        self.operations = Operations(
            np.asarray,
            np.asarray,
            lambda x: softmax(x).max(1),
            np.asarray,
            can_copy=lambda logits: len(logits) > 0,
        )

    def inputs(self, batch: Batch) -> np.ndarray:
        """Returns (n, C H W) in the learner's dtype; n may be 0."""
        return self._transform.flat(batch["x"], self._dtype)

    def each(self, outputs: np.ndarray, batch: Batch, training: bool) -> Each:
        smoothing = self._form.smoothing if training else 0.0
        loss, _ = self._of_labels(outputs, batch["y"], smoothing)
        if "mixup_weight" in batch:
            weight = batch["mixup_weight"].astype(self._dtype)
            loss = (
                weight * loss
                + (1 - weight) * self._of_labels(outputs, batch["partner_y"], smoothing)[0]
            )
        return Each(loss, right_terms(outputs, batch["y"], self._form.top_k))

    def gradient(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        """Returns d(loss of each sample) / d(outputs) in training, (n, outputs)."""
        error = self._of_labels(outputs, batch["y"], self._form.smoothing)[1]
        if "mixup_weight" in batch:
            weight = batch["mixup_weight"].astype(self._dtype)
            error = (
                weight[:, None] * error
                + (1 - weight)[:, None]
                * self._of_labels(outputs, batch["partner_y"], self._form.smoothing)[1]
            )
        return error

    def _of_labels(
        self, logits: np.ndarray, labels: np.ndarray, smoothing: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns each sample's loss (n,), and d(loss) / d(logits) (n, outputs)."""
        outputs = logits.shape[1]
        target = (
            np.eye(outputs, dtype=self._dtype)[labels] * (1.0 - smoothing) + smoothing / outputs
        )
        if self._form.squared_error:
            error = logits - target
            return self._weighted(0.5 * np.square(error).sum(1), error, labels)
        shifted = logits - logits.max(1, keepdims=True, initial=-np.inf)
        log_softmax = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        return self._weighted(-(log_softmax * target).sum(1), np.exp(log_softmax) - target, labels)

    def _weighted(
        self, loss: np.ndarray, error: np.ndarray, labels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._form.class_weights is None:
            return loss, error
        weights = np.array(self._form.class_weights, self._dtype)[labels]
        return weights * loss, weights[:, None] * error


def check_fields(source: Source, where: str) -> None:
    """Raises UserError unless samples have x and an integer label y."""
    y = source.fields.get("y")
    if "x" in source.fields and y is not None and not y.shape and np.dtype(y.dtype).kind in "iub":
        refuse_nothing("x", source.fields["x"], where)
        return
    found = ", ".join(f"{field} {kind}" for field, kind in source.fields.items())
    what = f"task.name=classification needs {_NEEDS}; the data have {found}"
    raise UserError(
        what,
        where,
        f"{_as_labels(y)}another task.name (regression, language), or data with classes",
    )


def _as_labels(y: Field | None) -> str:
    """Returns code that converts a field to labels, for an error message."""
    if y is None:
        return ""
    if y.shape == (1,):
        return "y[:, 0], a number for each sample (of files data.fields={..., y: 'y[:, 0]'}); "
    if len(y.shape) == 1:
        return "y.argmax(1) where y has a one for the class of each sample; "
    return (
        "y.astype('int64') where y counts classes, of files data.dtypes={y: int64}; "
        if not y.shape
        else ""
    )


class LabelledPart:
    """Adds the sum "labelled" to a part: the number of samples with a class, that is, any label
    except `ignored`."""

    def __init__(self, part: Any, ignored: int | None) -> None:
        self._part = part
        self._ignored = ignored
        self.inputs = part.inputs
        self.operations = part.operations
        self._where = part.where

    def each(self, outputs: Any, batch: Mapping[str, Any], training: bool) -> Each:
        has_class, with_classes = self._labels(batch)
        each = self._part.each(outputs, with_classes, training)
        terms = {name: term & has_class for name, term in each.terms.items()}
        return Each(self._where(has_class, each.loss, 0.0), {**terms, "labelled": has_class})

    def gradient(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        """In NumPy: d(loss of each sample) / d(outputs), (n, outputs)."""
        has_class, with_classes = self._labels(batch)
        return np.where(
            has_class[:, None],
            self._part.gradient(outputs, with_classes),
            np.zeros((), outputs.dtype),
        )

    def _labels(self, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns which samples have a class, bool (n,), and the batch with all others set to class
        0."""
        has_class = batch["y"] != self._ignored
        return has_class, {**batch, "y": self._where(has_class, batch["y"], 0)}
