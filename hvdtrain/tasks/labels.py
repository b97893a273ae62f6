"""The labels of a data set: the number of classes, and notes on unusual labels."""

from __future__ import annotations

import numpy as np

from hvdtrain.data.source import LabelledImages, Source
from hvdtrain.errors import UserError

_MOST_CLASSES = 2**20  # limit for the largest label


def number_of_classes(train: Source, val: Source, ignored: int | None, where: str) -> int:
    """Returns the number of classes that the data declare, or the largest label of both sets plus
    one. Raises UserError if neither is known."""
    of_train = classes_of(train, ignored)
    of_val = classes_of(val, ignored)
    for source in (train, val):
        _refuse_too_many(source, ignored, where)
    if of_train and of_val:
        declared = isinstance(train, LabelledImages) or train.fields["y"].values
        return of_train if declared else max(of_train, of_val)
    for name, source in (("training", train), ("validation", val)):
        if source.known_labels() is not None and not classes_of(source, ignored):
            every = (
                "is below zero"
                if ignored is None
                else f"is task.ignore_label={ignored}, or below zero"
            )
            raise UserError(
                f"no {name} sample has a class: every label {every}", where, "labels from 0"
            )
    fix = (
        "give the Dataset an attribute `classes`: their names, or how many there are, or its "
        "labels as `targets`"
    )
    what = "the number of classes is not known: labels are read sample by sample"
    raise UserError(what, where, f"{fix}; or to predict numbers: task.name=regression")


def classes_of(source: Source, ignored: int | None) -> int:
    """Returns the declared number of classes, or the largest label that is not ignored plus one; 0
    if all samples would have to be read."""
    declared = source.fields["y"].values
    if declared and (declared - 1 != ignored or source.class_names):
        return declared
    labels = source.known_labels()
    if labels is None:
        return declared
    labels = labels if ignored is None else labels[labels != ignored]
    return max(0, int(labels.max()) + 1) if len(labels) else 0


def _refuse_too_many(source: Source, ignored: int | None, where: str) -> None:
    """Raises UserError if undeclared labels are too large to be classes."""
    labels = source.known_labels()
    if labels is None or classes_of(source, ignored) <= _MOST_CLASSES:
        return
    sample = int(np.argmax(np.where(labels == ignored, 0, labels)))
    what = (
        f"field y of sample {sample} has {labels[sample]}, which is too large for the label of "
        "a class"
    )
    raise UserError(
        what,
        source.where or where,
        "labels from 0; to predict numbers: task.name=regression",
    )


def notes_on_labels(train: Source, val: Source, classes: int, ignored: int | None) -> list[str]:
    """Returns notes for the user: that labels begin at 1, and how many samples have no class."""
    labels = train.known_labels()
    if labels is None:
        return []
    lines = []
    if ignored is not None:
        sets = [
            (name, source.known_labels())
            for name, source in (("training", train), ("validation", val))
        ]
        left_out = [
            f"{np.count_nonzero(y == ignored):,} of {len(y):,} {name} samples"
            for name, y in sets
            if y is not None
        ]
        lines.append(
            f"task.ignore_label={ignored}: {' and '.join(left_out)} are in no loss, metric or count"
        )
        labels = labels[labels != ignored]
    if len(labels) and labels.min() == 1 and classes > 1:
        lines.append(
            f"labels begin at 1: no training sample is of class 0, one of the {classes} outputs "
            "of the model; y - 1 counts from 0"
        )
    return lines
