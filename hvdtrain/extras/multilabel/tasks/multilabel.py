"""Several labels per sample, each present or not: binary cross-entropy, F1, and average precision
of probabilities in bins."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, Sums, ratio
from hvdtrain.data.field import Field
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.tasks.label_counts import edges_of_bins, notes_on_gaps, terms
from hvdtrain.tasks.task import (
    DeviceAndDtype,
    Each,
    NumpyPart,
    Task,
    TaskPart,
    find_field,
    is_users_model,
)
from hvdtrain.tasks.transform import Transform, check_stats, input_stats

Objective = Literal["loss", "f1", "f1_macro", "average_precision"]
_MOST = 2**20  # limit for labels, and for the bins of all labels: a row of bytes for each sample


@dataclass(frozen=True)
class Multilabel(Task):
    """Predicts several labels: one logit for each of `labels` labels, from a field x."""

    x: Field
    labels: int
    mean: np.ndarray  # float64, of Transform
    std: np.ndarray
    bins: int = 100  # bins of probabilities for the average precision; 0: do not compute it
    objective: Objective = "f1"

    name = "multilabel"
    sample_weight = 1

    @property
    def fields(self) -> dict[str, Field]:
        return {"x": self.x, "y": Field("uint8", (self.labels,), 2)}

    @property
    def sizes(self) -> dict[str, Any]:
        return {"shape": self.x.shape or (1,), "outputs": self.labels}

    @property
    def transform(self) -> Transform:
        return Transform(self.x, self.mean, self.std)

    @property
    def summary(self) -> str:
        return (
            f"{'x'.join(map(str, self.x.shape)) or '1'} {self.x.dtype}, {self.labels:,} "
            f"label{'s' if self.labels > 1 else ''}, each 0 or 1"
        )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        metrics = (
            Metric("loss", ratio("loss", "count"), "min"),
            Metric("f1", micro_f1, "max", percent=True),
            Metric("f1_macro", macro_f1, "max", column="macro", percent=True),
        )
        if not self.bins:
            return metrics
        return (
            *metrics,
            Metric(
                "average_precision",
                mean_average_precision(self.bins),
                "max",
                column="ap",
                percent=True,
            ),
        )

    @property
    def sums(self) -> dict[str, int]:
        found = {
            "loss": 0,
            **dict.fromkeys(("true_positives", "false_positives", "false_negatives"), self.labels),
        }
        return (
            found | dict.fromkeys(("positives_by_bin", "all_by_bin"), self.labels * self.bins)
            if self.bins
            else found
        )

    def notes_on_data(self, train: Source, val: Source, has_given_stats: bool) -> list[str]:
        return notes_on_gaps(train, self.name, self.labels, None)

    def weight(self, batch: Batch) -> int:
        return len(batch["y"])

    def facts(self) -> dict[str, Any]:
        stats = {"mean": self.mean.tolist(), "std": self.std.tolist()}
        return {
            "x": [self.x.dtype, list(self.x.shape)],
            "labels": self.labels,
            **stats,
            "bins": self.bins,
            "objective": self.objective,
        }

    def outputs(self, samples: int) -> str:
        return f"logits ({samples}, {self.labels})"

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        return found == (samples, self.labels)

    def torch(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        from hvdtrain.extras.multilabel.torch_part import TorchMultilabel
        from hvdtrain.tasks.torch import TorchInputs

        return TorchMultilabel(
            TorchInputs(self.transform, place, is_users_model(model)), self.bins, place
        )

    def jax(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        return place.parts.JaxMultilabel(
            place.parts.JaxInputs(self.transform, place, is_users_model(model)), self.bins
        )

    def numpy(self, model: ModelConfig, place: DeviceAndDtype) -> NumpyPart:
        return NumpyMultilabel(self.transform, self.bins, place)


def build(
    name: str,
    train: Source,
    val: Source,
    where: str,
    users_model: bool = False,
    *,
    bins: int = 100,
    objective: Literal["loss", "f1", "f1_macro", "average_precision"] = "f1",
    standardize: bool | None = None,
) -> Multilabel:
    """Builds the task for a field x of any shape and a row y of zeros and ones for each sample, one
    per label.

    bins: of equal width, into which probabilities are counted for the average precision; 0: without
        it
    objective: the metric of stop.target, checkpoint.keep_best and log.targets: loss, f1, f1_macro,
        average_precision
    standardize: true: (x - mean) / std of the training set, by the last axis; false: x as it is;
        default: docs/tasks.md

    Raises UserError if the data lack these fields, if y has values other than 0 and 1, or if the
    sets do not match.
    """
    x, y = (
        find_field(train, field, name, where, of)
        for field, of in (("x", "numbers of any shape"), ("y", "a row of 0 and 1"))
    )
    for field, kind in (("x", x), ("y", y)):
        other = find_field(val, field, name, where, "as in the training set")
        if other.shape != kind.shape or other.dtype != kind.dtype:
            what = f"{field} is {kind} in the training set, {other} in the validation set"
            raise UserError(what, where, "both sets need the same fields")
    if len(y.shape) != 1 or np.dtype(y.dtype).kind not in "iub":
        fix = (
            "y[:, None] for one label; np.eye(classes, dtype='uint8')[y] for classes"
            if not y.shape
            else "y.astype('uint8')"
        )
        raise UserError(
            f"task.name=multilabel needs a row of 0 and 1 for each sample; y is {y}", where, fix
        )
    if not (bins == 0 or 2 <= bins <= _MOST // y.shape[0]):
        fix = f"2 to {_MOST // y.shape[0]}, or 0 for no average precision"
        raise UserError(
            f"task.bins={bins} is not possible with {y.shape[0]:,} labels", "task.bins", fix
        )
    if objective == "average_precision" and not bins:
        raise UserError(
            "task.bins=0 leaves out the average precision, which is task.objective",
            "task.bins",
            "task.bins=100",
        )
    return Multilabel(
        x._replace(values=0),
        y.shape[0],
        *input_stats(train, standardize, users_model),
        bins,
        objective,
    )


def restore(facts: dict[str, Any]) -> Multilabel:
    """Rebuilds the task from Multilabel.facts(). Raises KeyError, TypeError, ValueError or
    OverflowError if facts are missing or invalid."""
    dtype, shape = facts["x"]
    x = Field(np.dtype(dtype).name, tuple(shape))
    labels = facts["labels"]
    bins = facts["bins"]
    if (
        not all(type(size) is int and size >= 1 for size in (*x.shape, labels))
        or math.prod(x.shape) > 2**26
        or labels > _MOST
    ):
        raise ValueError("impossible shape or labels")
    if (
        type(bins) is not int
        or not (bins == 0 or 2 <= bins <= _MOST // labels)
        or facts["objective"] not in get_args(Objective)
    ):
        raise ValueError("impossible bins or objective")
    mean, std = (np.array(facts[name], np.float64) for name in ("mean", "std"))
    check_stats(x, mean, std)
    return Multilabel(x, labels, mean, std, bins, facts["objective"])


def micro_f1(sums: Sums) -> float:
    """Computes 2 TP / (2 TP + FP + FN) of all labels together; 0 if no label is present or
    predicted."""
    true = np.sum(sums["true_positives"])
    wrong = np.sum(sums["false_positives"]) + np.sum(sums["false_negatives"])
    return float(2.0 * true / max(2.0 * true + wrong, 1.0)) if sums["count"] else math.nan


def macro_f1(sums: Sums) -> float:
    """Computes the mean F1 over labels; a label that no sample has and the model never predicts has
    F1 0."""
    names = ("true_positives", "false_positives", "false_negatives")
    true, false, missed = (np.asarray(sums[name], np.float64) for name in names)
    return (
        float(np.mean(2.0 * true / np.maximum(2.0 * true + false + missed, 1.0)))
        if sums["count"]
        else math.nan
    )


def mean_average_precision(bins: int) -> Callable[[Sums], float]:
    """Computes the mean average precision: for each label that any sample has, the sum over bins,
    from the highest, of (step of recall) x precision.

    This equals the average precision with each score replaced by its bin number. NaN if no sample
    has a label.
    """

    def of(sums: Sums) -> float:
        positives, every = (
            np.reshape(np.asarray(sums[name], np.float64), (-1, bins))[:, ::-1]
            for name in ("positives_by_bin", "all_by_bin")
        )
        known = positives.sum(1) > 0
        if not known.any():
            return math.nan
        # (labels, bins)
        positives = positives[known]
        every = every[known]
        precision = positives.cumsum(1) / np.maximum(every.cumsum(1), 1.0)
        return float(np.mean((precision * positives).sum(1) / positives.sum(1)))

    return of


class NumpyMultilabel:
    """The reference implementation for the other frameworks, with a hand-written gradient. x is as
    in regression, y uint8 (n, labels), logits (n, labels)."""

    def __init__(self, transform: Transform, bins: int, place: DeviceAndDtype) -> None:
        self._transform = transform
        self._edges = edges_of_bins(bins)
        self._dtype = place.dtype

    def inputs(self, batch: Batch) -> np.ndarray:
        """Returns (n, features) in the learner's dtype; n may be 0."""
        return self._transform.flat(batch["x"], self._dtype)

    def each(self, outputs: np.ndarray, batch: Batch, training: bool) -> Each:
        y = batch["y"].astype(self._dtype)
        loss = (np.logaddexp(np.zeros((), outputs.dtype), outputs) - y * outputs).mean(1)
        return Each(loss, terms(outputs, _sigmoid(outputs), batch["y"] > 0, self._edges))

    def gradient(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        """Returns (n, labels)"""
        grad: np.ndarray = (_sigmoid(outputs) - batch["y"].astype(self._dtype)) / outputs.shape[1]
        return grad


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    """Computes 1 / (1 + exp(-logits)) without overflow."""
    probabilities: np.ndarray = 0.5 * (1.0 + np.tanh(0.5 * logits))
    return probabilities
