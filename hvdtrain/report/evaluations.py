"""The evaluations of a run (`hvdtrain evaluate`), read back from its events."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hvdtrain.report.run import Fields, RunRecord, numbers

_MOST_CLASSES = 100  # of a confusion matrix
_LONGEST_NAME = 40


class ClassResult(NamedTuple):
    """Result of one class that has samples."""

    name: str
    samples: float
    accuracy: float
    mistake: str  # the class that it is most often taken for, and how often; empty where there is none or it is not known


def of_run(run: RunRecord) -> list[Fields]:
    return run.events_of("evaluation")


def data_of(evaluation: Fields) -> str:
    """fashion_mnist in /scratch/data, val"""
    root = evaluation.get("root")
    return f"{evaluation.get('data')}{f' in {root}' if root else ''}, {evaluation.get('split')}"


def class_results(evaluation: Fields) -> list[ClassResult]:
    """By label; empty where they are not recorded."""
    samples, accuracies = numbers(evaluation, "class_samples"), numbers(evaluation, "class_accuracy")
    if len(samples) != len(accuracies):
        return []
    mistakes = _most_frequent_mistakes(evaluation.get("confused"), len(samples))
    names = class_names(evaluation, len(samples))
    results = []
    for label, (count, accuracy) in enumerate(zip(samples, accuracies, strict=True)):
        if count > 0 and math.isfinite(accuracy):
            other, times = mistakes.get(label, (0, 0))
            results.append(ClassResult(names[label], count, accuracy, f"{names[other]} ({times:,})" if times else ""))
    return results


def class_names(evaluation: Fields, classes: int) -> list[str]:
    """Printable; numbers where there are no names."""
    names = evaluation.get("class_names")
    if not isinstance(names, list) or len(names) != classes:
        return [str(label) for label in range(classes)]
    return ["".join(letter if letter.isprintable() else "?" for letter in str(name)[:_LONGEST_NAME]) for name in names]


def confusion(evaluation: Fields) -> list[list[float]] | None:
    """[label][what the model says] as shares of the samples of the label; None where there is no such square matrix."""
    rows = evaluation.get("confusion")
    if not isinstance(rows, list) or not 2 <= len(rows) <= _MOST_CLASSES:
        return None
    counts = [numbers({"row": row}, "row") for row in rows]
    if any(len(row) != len(rows) or not all(count >= 0 for count in row) for row in counts):
        return None
    return [[count / sum(row) if sum(row) else 0.0 for count in row] for row in counts]


def _most_frequent_mistakes(confused: Any, classes: int) -> dict[int, tuple[int, int]]:
    """label -> (what it is taken for most often, how often), of those that the event lists."""
    found: dict[int, tuple[int, int]] = {}
    for entry in confused if isinstance(confused, list) else ():
        if isinstance(entry, list) and len(entry) == 3 and all(type(value) is int for value in entry):
            label, other, times = entry
            if 0 <= label < classes and 0 <= other < classes and times > found.get(label, (0, 0))[1]:
                found[label] = (other, times)
    return found
