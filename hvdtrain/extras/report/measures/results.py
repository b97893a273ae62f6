"""What a run recorded beside its steps: evaluations with their classes and curves, and the values
that a script logged."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hvdtrain.records.run import LONGEST_NAME, Fields, RunRecord, number, numbers

_MOST_CURVES = 20  # classes with curves
_MOST_CLASSES = 100  # of a confusion matrix
_MOST_LOGGED = 50  # names


class ClassResult(NamedTuple):
    """Result of one class that has samples."""

    name: str
    samples: float
    accuracy: float
    # the most frequent wrong prediction, and how often; empty if there is none or it is not known
    mistake: str


def evaluations_of(run: RunRecord) -> list[Fields]:
    return run.events_of("evaluation")


def evaluated_data(evaluation: Fields) -> str:
    """Describes the evaluated data: fashion_mnist in /scratch/data, val."""
    root = evaluation.get("root")
    return f"{evaluation.get('data')}{f' in {root}' if root else ''}, {evaluation.get('split')}"


def class_results(evaluation: Fields) -> list[ClassResult]:
    """Returns results of classes by label; empty if not recorded."""
    samples = numbers(evaluation, "class_samples")
    accuracies = numbers(evaluation, "class_accuracy")
    if len(samples) != len(accuracies):
        return []
    mistakes = _most_frequent_mistakes(evaluation.get("confused"), len(samples))
    names = class_names(evaluation, len(samples))
    results = []
    for label, (count, accuracy) in enumerate(zip(samples, accuracies, strict=True)):
        if count > 0 and math.isfinite(accuracy):
            other, times = mistakes.get(label, (0, 0))
            results.append(
                ClassResult(
                    names[label], count, accuracy, f"{names[other]} ({times:,})" if times else ""
                )
            )
    return results


def class_names(evaluation: Fields, classes: int) -> list[str]:
    """Returns printable class names; numbers if there are none."""
    names = evaluation.get("class_names")
    if not isinstance(names, list) or len(names) != classes:
        return [str(label) for label in range(classes)]
    return [
        "".join(letter if letter.isprintable() else "?" for letter in str(name)[:LONGEST_NAME])
        for name in names
    ]


def confusion_shares(evaluation: Fields) -> list[list[float]] | None:
    """Returns [label][prediction] as shares of the label's samples; None without a square
    matrix."""
    rows = evaluation.get("confusion")
    if not isinstance(rows, list) or not 2 <= len(rows) <= _MOST_CLASSES:
        return None
    counts = [numbers({"row": row}, "row") for row in rows]
    if any(len(row) != len(rows) or not all(count >= 0 for count in row) for row in counts):
        return None
    return [[count / sum(row) if sum(row) else 0.0 for count in row] for row in counts]


def curves_of(evaluation: Fields, name: str) -> dict[int, tuple[list[float], list[float]]]:
    """label -> the points (x, y) of the curve `name` (roc, precision_recall), for the labels whose
    curve can be drawn."""
    found = evaluation.get(name)
    curves = {}
    for label, curve in enumerate(found if isinstance(found, list) else ()):
        if isinstance(curve, list) and len(curve) == 2:
            x, y = (numbers({"axis": axis}, "axis") for axis in curve)
            if 2 <= len(x) == len(y) and all(0 <= value <= 1 for value in (*x, *y)):
                curves[label] = (x, y)
    return curves if len(curves) <= _MOST_CURVES else {}


def calibration_of(evaluation: Fields) -> tuple[list[float], list[float]] | None:
    """(mean probability, share that is right) of each bin; None if the event does not have them."""
    found = evaluation.get("calibration")
    if not isinstance(found, list) or len(found) != 3:
        return None
    confidence, right, _ = (numbers({"column": column}, "column") for column in found)
    is_whole = 1 <= len(confidence) == len(right)
    if not is_whole or not all(0 <= value <= 1 for value in (*confidence, *right)):
        return None
    return confidence, right


def _most_frequent_mistakes(confused: Any, classes: int) -> dict[int, tuple[int, int]]:
    """Returns label -> (its most frequent wrong prediction, how often), for the labels that the
    event lists."""
    mistakes: dict[int, tuple[int, int]] = {}
    for entry in confused if isinstance(confused, list) else ():
        if (
            isinstance(entry, list)
            and len(entry) == 3
            and all(type(value) is int for value in entry)
        ):
            label, other, times = entry
            if (
                0 <= label < classes
                and 0 <= other < classes
                and times > mistakes.get(label, (0, 0))[1]
            ):
                mistakes[label] = (other, times)
    return mistakes


def logged_names(run: RunRecord) -> list[str]:
    """Returns the logged names, in the order of their first events."""
    names = dict.fromkeys(name for event in run.events for name in _values(event))
    return [name for name in names if name.isprintable() and 0 < len(name) <= LONGEST_NAME][
        :_MOST_LOGGED
    ]


def logged_steps(run: RunRecord, name: str) -> tuple[list[Fields], list[float]]:
    """Returns the step events with this name, and its value in each."""
    events = [event for event in run.step_events() if name in _values(event)]
    return events, [number({"value": _values(event)[name]}, "value") for event in events]


def finite_values(run: RunRecord, name: str) -> list[float]:
    return [value for value in logged_steps(run, name)[1] if math.isfinite(value)]


def _values(event: Fields) -> Fields:
    values = event.get("logged") if event["kind"] == "step" else None
    return values if isinstance(values, dict) else {}
