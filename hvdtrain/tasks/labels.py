"""The labels of a data set: the number of classes, and notes on unusual labels."""

from __future__ import annotations

from collections.abc import Sequence

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


_MAJORITY = 0.9  # the share of a class from which accuracy says little
_UNEVEN = 2  # the largest class over the smallest, from which the header shows the counts
_SHOWN = 20  # classes in a line of the header


def notes_on_counts(
    train: Source, classes: int, ignored: int | None, weights: Sequence[float] | None
) -> list[str]:
    """Returns notes on the number of training samples of each class, if they differ, and on a class
    that most samples have."""
    labels = train.known_labels()
    if labels is None or classes < 2:
        return []
    known = labels[(labels >= 0) & (labels < classes)]
    if ignored is not None:
        known = known[known != ignored]
    counts = np.bincount(known.astype(np.int64), minlength=classes)
    seen = counts[counts > 0]
    if not len(seen):
        return []
    lines = []
    if seen.max() > _UNEVEN * seen.min() or weights is not None:
        lines.append(f"training samples by class: {_counted(train, counts, weights)}")
    share = float(counts.max() / counts.sum())
    if share >= _MAJORITY:
        largest = _name(train, int(counts.argmax()))
        lines.append(
            f"{share:.1%} of the training samples are of class {largest}, so always predicting it "
            "has about that accuracy; task.objective=balanced_accuracy, auroc or "
            "average_precision tell models apart"
        )
    return lines


def _counted(train: Source, counts: np.ndarray, weights: Sequence[float] | None) -> str:
    """Formats the counts and weights of the first classes: no 950 (weight 0.53), yes 50 (weight
    10)."""
    shown = [
        f"{_name(train, label)} {count:,}"
        + (f" (weight {weights[label]:.3g})" if weights is not None else "")
        for label, count in enumerate(counts[:_SHOWN].tolist())
    ]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more:,} classes more" if more else "")


def _name(source: Source, label: int) -> str:
    names = source.class_names
    return str(names[label]) if names and label < len(names) else str(label)
