"""task.metrics of classification: F1, precision, recall, balanced accuracy and calibration error
from sums; AUROC and average precision from the scores of all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.metrics import Better, Concatenated, Metric, Sums
from hvdtrain.errors import UserError
from hvdtrain.tasks.around import AroundTask
from hvdtrain.tasks.label_counts import Operations, edges_of_bins, softmax
from hvdtrain.tasks.task import DeviceAndDtype, Each, Task, TaskPart

BINS = 15  # of the calibration error, of equal width (Guo et al. 2017, arXiv:1706.04599, eq. 3)
MOST_RANKED = 1000  # classes whose scores are gathered on rank 0: 8 kB of a sample
_COUNTS = ("class_predicted", "class_actual", "class_hits")
_BINNED = ("calibration_samples", "calibration_right", "calibration_confidence")
_COLUMNS = {"average_precision": "ap", "balanced_accuracy": "bal_acc", "calibration_error": "ece"}


class ScoredClasses(AroundTask):
    """A classification task with the metrics of task.metrics; its objective may be one of them."""

    def __init__(
        self,
        task: Task,
        names: Sequence[str],
        objective: str,
        classes: int,
        ignored: int | None,
    ) -> None:
        super().__init__(task)
        self.names = tuple(names)
        self.classes = classes
        self.ignored = ignored
        self._objective = objective

    @property
    def objective(self) -> str:
        return self._objective

    @property
    def details(self) -> str:
        return self.task.details

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (*self.task.metrics, *map(self._metric, self.names))

    @property
    def sums(self) -> dict[str, int]:
        has_counts = any(name in OF_COUNTS for name in self.names)
        return {
            **self.task.sums,
            **(dict.fromkeys(_COUNTS, self.classes) if has_counts else {}),
            **(dict.fromkeys(_BINNED, BINS) if self.is_calibrated else {}),
        }

    @property
    def is_calibrated(self) -> bool:
        """Whether the calibration error is computed."""
        return "calibration_error" in self.names

    @property
    def gathered(self) -> dict[str, Callable[[Concatenated], float]]:
        own = {_scores(name): _of_scores(name) for name in self.names if name in OF_SCORES}
        return {**self.task.gathered, **own}

    @property
    def notes(self) -> list[str]:
        ranked = [name for name in self.names if name in OF_SCORES]
        line = (
            f"{' and '.join(ranked)}: of evaluations alone, which gather the scores of every "
            "sample on rank 0"
        )
        return [*self.task.notes, *([line] if ranked else [])]

    def facts(self) -> dict[str, Any]:
        own = {"metrics": list(self.names), "objective": self.objective}
        return {**self.task.facts(), "scored": own}

    def part(self, framework: str, model: ModelConfig, place: DeviceAndDtype) -> Any:
        is_softmax = model.loss != "squared_error"
        part = self.task.part(framework, model, place)
        return ScoredPart(part, self, part.operations, is_softmax)

    def _metric(self, name: str) -> Metric:
        better: Better = "min" if name == "calibration_error" else "max"
        return Metric(name, self._value(name), better, _COLUMNS.get(name, ""), percent=True)

    def _value(self, name: str) -> Callable[[Sums], float]:
        if name in OF_SCORES:
            of_all = _of_scores(name)

            def of_gathered(sums: Sums) -> float:
                found = sums.get(_scores(name), Concatenated())
                # allreduce_sums() has computed it
                return of_all(found) if isinstance(found, Concatenated) else float(found)

            return of_gathered
        if name == "calibration_error":
            return calibration_error
        of_counts = OF_COUNTS[name]

        def of_sums(sums: Sums) -> float:
            if not sums["count"]:
                return math.nan
            return of_counts(*(np.asarray(sums[key], np.float64) for key in _COUNTS))

        return of_sums


class ScoredPart:
    """A part of a classification task with the terms of ScoredClasses."""

    def __init__(
        self, part: TaskPart, task: ScoredClasses, operations: Operations, is_softmax: bool
    ) -> None:
        self._part = part
        self._task = task
        self._operations = operations
        self._is_softmax = is_softmax
        self._classes = operations.array(np.arange(task.classes))
        self._edges = [operations.array(edge) for edge in edges_of_bins(BINS)]
        self.inputs = part.inputs
        self.gradient = getattr(part, "gradient", None)  # of NumPy

    def each(self, outputs: Any, batch: Mapping[str, Any], training: bool) -> Each:
        each = self._part.each(outputs, batch, training)
        logits = self._operations.logits(outputs)
        terms = {**each.terms, **self._terms(logits, batch["y"])}
        if training or not self._task.gathered or not self._operations.can_copy(logits):
            return each._replace(terms=terms)
        parts = self.parts_of(self._operations.on_host(logits), batch["y"])
        return each._replace(terms=terms, parts={**each.parts, **parts})

    def _terms(self, logits: Any, labels: Any) -> dict[str, Any]:
        """The terms of each sample, 0 for a sample without a class."""
        terms: dict[str, Any] = {}
        ignored = self._task.ignored
        has_class = (labels != ignored if ignored is not None else labels >= 0)[:, None]
        said = logits.argmax(1)
        if _COUNTS[0] in self._task.sums:
            predicted = (said[:, None] == self._classes) & has_class  # (n, classes)
            actual = (labels[:, None] == self._classes) & has_class
            terms |= dict(zip(_COUNTS, (predicted, actual, predicted & actual), strict=True))
        if self._task.is_calibrated:
            confidence = self._operations.confidence(logits)[:, None]
            lower, upper = self._edges
            is_in = (confidence >= lower) & (confidence < upper) & has_class  # (n, BINS)
            right = is_in & (said == labels)[:, None]
            terms |= dict(zip(_BINNED, (is_in, right, is_in * confidence), strict=True))
        return terms

    def parts_of(self, logits: np.ndarray, labels: Any) -> dict[str, Concatenated]:
        """Returns the scores of a batch for each of Task.gathered: float64 (n, classes), or (n, 1)
        of class 1 of two; and the labels, int64 (n,). Samples without a class are left out."""
        y = self._operations.on_host(labels).astype(np.int64)
        known = y >= 0 if self._task.ignored is None else y != self._task.ignored
        scores = logits[known].astype(np.float64)
        if self._is_softmax:
            scores = softmax(scores)
        # a model may have more outputs than there are classes
        scores = scores[:, : self._task.classes]
        scores = scores[:, 1:] if self._task.classes == 2 else scores
        part = Concatenated([((scores,), (y[known],))])
        return {_scores(name): part for name in self._task.names if name in OF_SCORES}


def f1(predicted: np.ndarray, actual: np.ndarray, hits: np.ndarray) -> float:
    """Computes 2 x hits / (predicted + actual) of class 1 of two classes, or its mean over the
    classes that occur, from counts (classes,); as scikit-learn with zero_division=0."""
    return _mean(2.0 * hits, predicted + actual, predicted + actual)


def precision(predicted: np.ndarray, actual: np.ndarray, hits: np.ndarray) -> float:
    """Computes hits / predicted, as f1()."""
    return _mean(hits, predicted, predicted + actual)


def recall(predicted: np.ndarray, actual: np.ndarray, hits: np.ndarray) -> float:
    """Computes hits / actual, as f1()."""
    return _mean(hits, actual, predicted + actual)


def balanced_accuracy(predicted: np.ndarray, actual: np.ndarray, hits: np.ndarray) -> float:
    """Computes the mean recall of the classes that samples have."""
    known = actual > 0
    return float(np.mean(hits[known] / actual[known])) if known.any() else math.nan


def _mean(above: np.ndarray, below: np.ndarray, occurrences: np.ndarray) -> float:
    """Returns the quotient of class 1 of two; of more, the mean over classes that occur. A quotient
    by 0 counts as 0."""
    quotients = above / np.maximum(below, 1.0)
    if len(quotients) == 2:
        return float(quotients[1])
    return float(np.mean(quotients[occurrences > 0])) if occurrences.any() else math.nan


def calibration_error(sums: Sums) -> float:
    """Computes the expected calibration error: the mean over samples of |accuracy - confidence| of
    their bin."""
    samples, right, confidence = (np.asarray(sums[key], np.float64) for key in _BINNED)
    total = samples.sum()
    return float(np.abs(right - confidence).sum() / total) if total else math.nan


def auroc(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """Computes the area under the ROC curve from scores (n,): the share of pairs of a positive and
    another sample in which the positive one has the higher score; equal scores count half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - 0.5 * (counts - 1))[inverse]
    positives = int(np.count_nonzero(is_positive))
    others = len(scores) - positives
    above = ranks[is_positive].sum() - 0.5 * positives * (positives + 1)
    return float(above / (positives * others))


def average_precision(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """Computes the sum over thresholds, from the highest, of (step of recall) x precision."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    positives = np.bincount(inverse, is_positive, len(counts))[::-1]
    shares = np.cumsum(positives) / np.cumsum(counts[::-1])
    return float((shares * positives).sum() / positives.sum())


OF_COUNTS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], float]] = {
    "f1": f1,
    "precision": precision,
    "recall": recall,
    "balanced_accuracy": balanced_accuracy,
}
OF_SCORES = {"auroc": auroc, "average_precision": average_precision}
NAMES = (*OF_SCORES, *OF_COUNTS, "calibration_error")


def _scores(name: str) -> str:
    return f"{name}_scores"


def _of_scores(name: str) -> Callable[[Concatenated], float]:
    """Returns the metric as a function of the scores of all samples: of class 1 of two, or the mean
    over the classes that some samples have and others do not. NaN if no class is like this."""
    of_class = OF_SCORES[name]

    def value(found: Concatenated) -> float:
        if not len(found):
            return math.nan
        scores = np.concatenate([part[0][0] for part in found])
        labels = np.concatenate([part[1][0] for part in found])
        if not np.isfinite(scores).all():
            return math.nan
        first = 1 if scores.shape[1] == 1 else 0  # the class of the first column
        values = []
        for column in range(scores.shape[1]):
            is_positive = labels == first + column
            if is_positive.any() and not is_positive.all():
                values.append(of_class(scores[:, column], is_positive))
        return float(np.mean(values)) if values else math.nan

    return value


def with_metrics(
    task: Task,
    names: Sequence[str],
    objective: str | None,
    classes: int,
    ignored: int | None,
) -> Task:
    """Returns the task with metrics and an objective. An objective of NAMES is added to the
    metrics.

    Raises UserError if the objective is not a metric, a metric is named twice, or there are too
    many classes to gather their scores.
    """
    own = list(names)
    if objective in NAMES and objective not in own:
        own.append(objective)
    ranked = next((name for name in own if name in OF_SCORES), None)
    if ranked and classes > MOST_RANKED:
        what = f"{ranked} gathers a score of every sample for each of {classes:,} classes"
        fix = f"at most {MOST_RANKED:,} classes; or f1, balanced_accuracy"
        raise UserError(what, "task.metrics", fix)
    if twice := [name for name in own if own.count(name) > 1]:
        raise UserError(f"task.metrics names {twice[0]} twice", "task.metrics", "name it once")
    known = [metric.name for metric in task.metrics]
    if objective is not None and objective not in (*known, *own):
        raise UserError(
            f"task.objective={objective} is not a metric of this job",
            "task.objective",
            f"one of {', '.join(dict.fromkeys((*known, *NAMES)))}",
        )
    if not own and objective in (None, task.objective):
        return task
    return ScoredClasses(task, own, objective or task.objective, classes, ignored)


def restored(task: Task, facts: Any, classes: int, ignored: int | None) -> Task:
    """Returns the task with the metrics of ScoredClasses.facts(). Raises KeyError, TypeError or
    ValueError if they are invalid."""
    names = facts["metrics"]
    objective = facts["objective"]
    known = [metric.name for metric in task.metrics]
    if not set(names) <= set(NAMES) or objective not in (*known, *names):
        raise ValueError("impossible metrics or objective")
    return ScoredClasses(task, names, objective, classes, ignored)
