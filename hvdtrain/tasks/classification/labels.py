"""The labels of two sets: how many classes they are of, what is wrong with them, and samples without a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.core.arrays import Batch
from hvdtrain.data.source import Field, LabelledImages, Source, known_labels
from hvdtrain.errors import UserError
from hvdtrain.tasks.task import Each, refuse_nothing

_MOST_CLASSES = 2**20  # by the largest label
_NEEDS = "x (images uint8 (H, W, C), or numbers) with integer labels y"


def check_fields(source: Source, where: str) -> None:
    """Raises UserError where a sample is not x with its label y, a whole number."""
    y = source.fields.get("y")
    if "x" in source.fields and y is not None and not y.shape and np.dtype(y.dtype).kind in "iub":
        refuse_nothing("x", source.fields["x"], where)
        return
    found = ", ".join(f"{field} {kind}" for field, kind in source.fields.items())
    what = f"task.name=classification needs {_NEEDS}; the data have {found}"
    raise UserError(what, where, f"{_as_labels(y)}another task.name (regression, language), or data of classes")


def _as_labels(y: Field | None) -> str:
    """What makes labels of a field that has none of them yet."""
    if y is None:
        return ""
    if y.shape == (1,):
        return "y[:, 0], a number for each sample; "
    if len(y.shape) == 1:
        return "y.argmax(1) where y has a one for the class of each sample; "
    return "y.astype('int64') where y counts classes; " if not y.shape else ""


def number_of_classes(train: Source, val: Source, ignored: int | None, where: str) -> int:
    """What the data declare, else one more than the largest label of both sets. Raises UserError where neither is known."""
    of_train, of_val = classes_of(train, ignored), classes_of(val, ignored)
    for source in (train, val):
        _refuse_too_many(source, ignored, where)
    if of_train and of_val:
        declared = isinstance(train, LabelledImages) or train.fields["y"].values
        return of_train if declared else max(of_train, of_val)
    for name, source in (("training", train), ("validation", val)):
        if known_labels(source) is not None and not classes_of(source, ignored):
            every = "is below zero" if ignored is None else f"is task.ignore_label={ignored}, or below zero"
            raise UserError(f"no {name} sample has a class: every label {every}", where, "labels from 0 on")
    fix = "give the Dataset an attribute `classes`: their names, or how many there are, or its labels as `targets`"
    what = "the number of classes is not known: labels are read sample by sample"
    raise UserError(what, where, f"{fix}; or for numbers to predict task.name=regression")


def classes_of(source: Source, ignored: int | None) -> int:
    """Declared, or by the largest label that is not ignored; 0 where that would take reading all samples."""
    declared = source.fields["y"].values
    if declared and (declared - 1 != ignored or (hasattr(source, "class_names") and source.class_names)):
        return declared
    labels = known_labels(source)
    if labels is None:
        return declared
    labels = labels if ignored is None else labels[labels != ignored]
    return max(0, int(labels.max()) + 1) if len(labels) else 0


def _refuse_too_many(source: Source, ignored: int | None, where: str) -> None:
    """Raises UserError where labels without a declaration are numbers of something else."""
    labels = known_labels(source)
    if labels is None or classes_of(source, ignored) <= _MOST_CLASSES:
        return
    sample = int(np.argmax(np.where(labels == ignored, 0, labels)))
    what = f"field y of sample {sample} has {labels[sample]}: too many classes to be some"
    raise UserError(what, getattr(source, "where", "") or where, "labels from 0 on; for numbers to predict task.name=regression")


def notes_on_labels(train: Source, val: Source, classes: int, ignored: int | None) -> list[str]:
    """Lines for the user: that labels begin at 1, and how many samples have no class."""
    labels = known_labels(train)
    if labels is None:
        return []
    lines = []
    if ignored is not None:
        sets = [(name, known_labels(source)) for name, source in (("training", train), ("validation", val))]
        left_out = [f"{np.count_nonzero(y == ignored):,} of {len(y):,} {name} samples" for name, y in sets if y is not None]
        lines.append(f"task.ignore_label={ignored}: {' and '.join(left_out)} are in no loss, metric or count")
        labels = labels[labels != ignored]
    if len(labels) and labels.min() == 1 and classes > 1:
        lines.append(f"labels begin at 1: no training sample is of class 0, one of the {classes} outputs of the model; y - 1 counts from 0")
    return lines


class LabelledPart:
    """Another part, and the sum "labelled": how many samples have a class, which is any label but `ignored`."""

    def __init__(self, part: Any, ignored: int | None) -> None:
        self._part, self._ignored = part, ignored
        self.inputs, self._where = part.inputs, part.where

    def each(self, outputs: Any, batch: Mapping[str, Any], training: bool) -> Each:
        has_class, with_classes = self._labels(batch)
        each = self._part.each(outputs, with_classes, training)
        return Each(self._where(has_class, each.loss, 0.0), {"right": each.terms["right"] & has_class, "labelled": has_class})

    def gradient(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        """In NumPy: d(loss of each sample) / d(outputs), (n, outputs)."""
        has_class, with_classes = self._labels(batch)
        return np.where(has_class[:, None], self._part.gradient(outputs, with_classes), np.zeros((), outputs.dtype))

    def _labels(self, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Which samples have a class, bool (n,); and the batch, in which all others are of class 0."""
        has_class = batch["y"] != self._ignored
        return has_class, {**batch, "y": self._where(has_class, batch["y"], 0)}
