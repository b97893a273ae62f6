"""What a run has measured: its metrics and the one that decides, its evaluations, and what a loop of a script logs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hvdtrain.report.run import Fields, RunRecord, number, numbers

_LONGEST_NAME = 40  # characters of a name
_MOST_METRICS = 16
_MOST_CLASSES = 100  # of a confusion matrix
_MOST_LOGGED = 50  # names


class RunMetric(NamedTuple):
    """A metric of a run's task."""

    name: str
    lower_is_better: bool = False
    percent: bool = False

    def shown(self, value: float) -> str:
        """Empty for NaN."""
        if not math.isfinite(value):
            return ""
        return f"{100 * value:.2f}%" if self.percent else f"{value:.4g}"


ACCURACY = RunMetric("accuracy", percent=True)
_OLDER = {"loss": RunMetric("loss", lower_is_better=True), "accuracy": ACCURACY}  # of a run from before there were other tasks


def metrics_of(run: RunRecord) -> dict[str, RunMetric]:
    """By name."""
    described = run.start_event.get("metrics")
    if not isinstance(described, dict):
        return _OLDER
    found = {}
    for name, how in list(described.items())[:_MOST_METRICS]:
        if isinstance(how, dict) and name.isprintable() and 0 < len(name) <= _LONGEST_NAME:
            found[name] = RunMetric(name, how.get("better") == "min", how.get("percent") is True)
    return found


def objective_of(run: RunRecord) -> RunMetric:
    """The metric of stop.target and checkpoint.keep_best."""
    name = run.start_event.get("objective")
    return metrics_of(run).get(name, ACCURACY) if isinstance(name, str) else ACCURACY


class ClassResult(NamedTuple):
    """Result of one class that has samples."""

    name: str
    samples: float
    accuracy: float
    mistake: str  # the class that it is most often taken for, and how often; empty where there is none or it is not known


def evaluations_of(run: RunRecord) -> list[Fields]:
    return run.events_of("evaluation")


def evaluated_data(evaluation: Fields) -> str:
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


def confusion_shares(evaluation: Fields) -> list[list[float]] | None:
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


def logged_names(run: RunRecord) -> list[str]:
    """In the order of their first events."""
    names = dict.fromkeys(name for event in run.events for name in _values(event))
    return [name for name in names if name.isprintable() and 0 < len(name) <= _LONGEST_NAME][:_MOST_LOGGED]


def logged_steps(run: RunRecord, name: str) -> tuple[list[Fields], list[float]]:
    """The events of steps that have it, and its value in each."""
    events = [event for event in run.step_events() if name in _values(event)]
    return events, [number({"value": _values(event)[name]}, "value") for event in events]


def finite_values(run: RunRecord, name: str) -> list[float]:
    return [value for value in logged_steps(run, name)[1] if math.isfinite(value)]


def _values(event: Fields) -> Fields:
    values = event.get("logged") if event["kind"] == "step" else None
    return values if isinstance(values, dict) else {}
