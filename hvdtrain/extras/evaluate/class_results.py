"""The result of an evaluation, as an event and as lines: metrics, classes, the most frequent
mistakes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.extras.evaluate.curves import Curve, precision_recall_curve, roc_curve, thinned
from hvdtrain.extras.trained_models.evaluation import ClassCounts, ClassScores, Evaluation
from hvdtrain.tasks.class_metrics import BINS, auroc, average_precision
from hvdtrain.tasks.rows import name_of_class

_MOST_ROWS = 20  # classes on the screen, the ones with the lowest accuracy
_MOST_MATRIX = 100  # classes up to which an event has the confusion matrix
_MOST_POINTS = 101  # points of a curve in an event
_MOST_PAIRS = 20  # pairs of confused classes in an event


def evaluation_fields(evaluation: Evaluation, class_names: Sequence[str] | None) -> dict[str, Any]:
    """Returns fields of the event "evaluation", except the fields that identify model and data."""
    of_all: dict[str, Any] = {**evaluation.metrics, "count": evaluation.samples}
    if evaluation.classes is None:
        return of_all
    confusion = evaluation.classes.confusion
    return {
        **of_all,
        "class_names": None if class_names is None else list(class_names),
        "class_samples": evaluation.classes.samples.tolist(),
        "class_accuracy": class_accuracies(evaluation.classes),
        "class_precision": class_precisions(confusion),
        "confusion": confusion.tolist()
        if confusion is not None and len(confusion) <= _MOST_MATRIX
        else None,
        "confused": most_confused(confusion, _MOST_PAIRS),
        **score_fields(evaluation.scores),
    }


def score_fields(scores: ClassScores | None) -> dict[str, Any]:
    """AUROC, average precision, ROC and precision-recall curve of each class against the others,
    and the calibration; null for a class that no sample has, or all; empty without scores."""
    if scores is None or not np.isfinite(scores.probabilities).all():
        return {}
    found: dict[str, list[Any]] = {
        name: [] for name in ("class_auroc", "class_average_precision", "roc", "precision_recall")
    }
    for label in range(scores.probabilities.shape[1]):
        is_positive = scores.labels == label
        one = scores.probabilities[:, label]
        if not is_positive.any() or is_positive.all():
            for values in found.values():
                values.append(None)
            continue
        found["class_auroc"].append(auroc(one, is_positive))
        found["class_average_precision"].append(average_precision(one, is_positive))
        found["roc"].append(_points(roc_curve(one, is_positive)))
        found["precision_recall"].append(_points(precision_recall_curve(one, is_positive)))
    return {**found, "calibration": _calibration(scores)}


def _points(curve: Curve) -> list[list[float]]:
    """[x of all points, y of all points]"""
    return [[round(value, 5) for value in axis.tolist()] for axis in thinned(curve, _MOST_POINTS)]


def _calibration(scores: ClassScores) -> list[list[float]]:
    """[mean probability of the predicted class, share that is right, samples] of each bin that has
    samples."""
    bins = np.minimum((scores.largest * BINS).astype(np.int64), BINS - 1)
    samples = np.bincount(bins, minlength=BINS)
    shown = np.flatnonzero(samples)
    columns = (
        np.bincount(bins, scores.largest, BINS)[shown] / samples[shown],
        np.bincount(bins, scores.is_right, BINS)[shown] / samples[shown],
        samples[shown],
    )
    return [[round(value, 5) for value in column.tolist()] for column in columns]


def class_accuracies(counts: ClassCounts) -> list[float]:
    """Returns accuracy of each class; NaN if it has no samples."""
    pairs = zip(counts.right.tolist(), counts.samples.tolist(), strict=True)
    return [right / samples if samples else math.nan for right, samples in pairs]


def class_precisions(confusion: np.ndarray | None) -> list[float] | None:
    """Computes the precision of each class; NaN if the model never predicts it, None without a
    confusion matrix."""
    if confusion is None:
        return None
    return [
        right / said if said else math.nan
        for right, said in zip(
            np.diagonal(confusion).tolist(), confusion.sum(0).tolist(), strict=True
        )
    ]


def most_confused(confusion: np.ndarray | None, most: int) -> list[list[int]]:
    """Returns [label, prediction, how often] of the most frequent mistakes, the most frequent
    first."""
    if confusion is None:
        return []
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    rows, columns = np.unravel_index(order, wrong.shape)
    return [
        [int(row), int(column), int(wrong[row, column])]
        for row, column in zip(rows, columns, strict=True)
        if wrong[row, column]
    ]


def evaluation_lines(evaluation: Evaluation, class_names: Sequence[str] | None) -> list[str]:
    """Returns the metrics and a line for each class; if there are many, for the classes with the
    lowest accuracy."""
    width = max(8, *(len(name) for name in evaluation.metrics))
    metrics = [f"{name:{width}} {value:.4f}" for name, value in evaluation.metrics.items()]
    if evaluation.classes is None:
        return metrics
    right = int(evaluation.classes.right.sum())
    count = int(evaluation.classes.samples.sum())
    metrics = [
        f"{line}: {right:,} of {count:,} right" if line.startswith("accuracy ") else line
        for line in metrics
    ]
    return [*metrics, *_class_lines(evaluation.classes, class_names)]


def _class_lines(counts: ClassCounts, class_names: Sequence[str] | None) -> list[str]:
    names = [name_of_class(label, class_names) for label in range(len(counts.samples))]
    accuracies = class_accuracies(counts)
    seen = [label for label in range(len(names)) if counts.samples[label]]
    shown = (
        seen
        if len(seen) <= _MOST_ROWS
        else sorted(seen, key=lambda label: accuracies[label])[:_MOST_ROWS]
    )
    width = max(5, *(len(names[label]) for label in shown))
    head = f"{'class':{width}}  samples  accuracy  most often taken for"
    rows = [
        f"{names[label]:{width}}  {counts.samples[label]:7,}  {accuracies[label]:8.4f}  "
        f"{_mistake(counts.confusion, label, names)}"
        for label in shown
    ]
    return [
        head,
        *(row.rstrip() for row in rows),
        *(
            [f"the {_MOST_ROWS} classes with the lowest accuracy, of {len(seen):,}"]
            if len(shown) < len(seen)
            else []
        ),
    ]


def _mistake(confusion: np.ndarray | None, label: int, names: list[str]) -> str:
    """Formats the most frequent mistake for a label: Coat (31)."""
    if confusion is None:
        return ""
    said = confusion[label].copy()
    said[label] = 0
    return f"{names[int(said.argmax())]} ({said.max():,})" if said.any() else ""
