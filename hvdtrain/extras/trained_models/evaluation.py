"""The metrics of a model on a data set, and its confusion matrix: exact sums over any number of
ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import allreduce_sums, gather_parts
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Concatenated, Sums, add_sums, zero_sums
from hvdtrain.data.around_source import inner_source
from hvdtrain.data.source import Source
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.label_counts import softmax
from hvdtrain.tasks.task import Task
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.predictions import predict

MOST_SCORED = 20  # classes whose probabilities are gathered: 160 bytes of a sample
MOST_CONFUSED = 1000  # classes of a confusion matrix: 8 MB that are reduced over ranks


class ClassCounts(NamedTuple):
    """Counts over all samples of a data set with classes, the same on all ranks."""

    samples: np.ndarray  # int64 (classes,), how many there are of each class
    right: np.ndarray  # int64 (classes,), how many of them the model predicts correctly
    confusion: (
        np.ndarray | None
    )  # int64 (classes, classes), [label, prediction]; None for more than MOST_CONFUSED classes


class ClassScores(NamedTuple):
    """The probabilities of all samples with a class, in the order of the ranks."""

    probabilities: np.ndarray  # float64 (n, classes)
    labels: np.ndarray  # int64 (n,)
    # of the predicted class, which a model with more outputs than classes may not have; and whether
    # it is the label
    largest: np.ndarray  # float64 (n,)
    is_right: np.ndarray  # bool (n,)


class Evaluation(NamedTuple):
    """The result of an evaluation over all samples of a data set, the same on all ranks but for
    `scores`."""

    samples: int
    metrics: dict[str, float]  # of the task, by name
    classes: ClassCounts | None  # of task.name=classification
    scores: ClassScores | None  # on rank 0; None for more than MOST_SCORED classes


def evaluate(
    config: Config,
    learner: Learner,
    source: Source,
    task: Task,
    communicator: Communicator,
    heartbeat: Heartbeat,
) -> Evaluation:
    """Evaluates every sample of `source` once. Every rank calls it."""
    sums = zero_sums(task.sums)
    counter = scores = labels = None
    if task.class_label is not None and (labels := labels_as_read(source)) is not None:
        label = task.fields[task.class_label]
        counter = _ClassCounter(label.values, label.ignored)
        if label.values <= MOST_SCORED and config.model.loss == "cross_entropy":
            scores = Concatenated()
    for indices, predictions in predict(config, learner, source, communicator, heartbeat):
        sums = add_sums(sums, predictions.sums)
        if counter is not None and labels is not None:
            y = labels[indices].astype(np.int64)
            counter.add(y, predictions.outputs.argmax(1))
            if scores is not None:
                known = y != counter.ignored
                shares = softmax(predictions.outputs[known].astype(np.float64))
                own = shares[:, : counter.classes], shares.max(1), shares.argmax(1) == y[known]
                scores += Concatenated([(own, (y[known],))])
    counts = counter.counts() if counter is not None else {}
    total = allreduce_sums(communicator, sums | counts, "evaluation.sums", task.sums, task.gathered)
    assert total["count"] == len(source), (total["count"], len(source))
    return Evaluation(
        len(source),
        {metric.name: metric.of(total) for metric in task.metrics},
        None if counter is None else counter.of_all_ranks(total),
        None if scores is None else _scores_of_all_ranks(communicator, scores),
    )


def labels_as_read(source: Source) -> np.ndarray | None:
    """Returns the field y of every sample, if it is known without reading samples. The labels that
    a user's Dataset lists may differ from those of its samples."""
    innermost = source
    while (inner := inner_source(innermost)) is not None:
        innermost = inner
    return None if innermost.is_users_dataset else source.known_labels()


def _scores_of_all_ranks(communicator: Communicator, own: Concatenated) -> ClassScores | None:
    """Gathers the scores on rank 0; None on the others, and without samples. A collective."""
    found = gather_parts(communicator, own, "evaluation.scores")
    if found is None or not len(found):
        return None
    return ClassScores(
        np.concatenate([part[0][0] for part in found]),
        np.concatenate([part[1][0] for part in found]),
        *(np.concatenate([part[0][place] for part in found]) for place in (1, 2)),
    )


class _ClassCounter:
    """Counts this rank's samples by class and predicted class."""

    def __init__(self, classes: int, ignored: int | None) -> None:
        self.classes = classes
        self.ignored = ignored
        self.samples = np.zeros(classes, np.int64)
        self.right = np.zeros(classes, np.int64)
        self.confusion = (
            np.zeros((classes, classes), np.int64) if classes <= MOST_CONFUSED else None
        )

    def add(self, labels: np.ndarray, said: np.ndarray) -> None:
        has_class = labels != self.ignored
        labels = labels[has_class]
        said = said[has_class]
        self.samples += np.bincount(labels, minlength=self.classes)
        self.right += np.bincount(labels[labels == said], minlength=self.classes)
        if self.confusion is not None:
            known = said < self.classes  # a model may have more outputs than there are classes
            np.add.at(self.confusion, (labels[known], said[known]), 1)

    def counts(self) -> dict[str, np.ndarray]:
        """Counts to sum over ranks, float64 (n,) each."""
        counts = {"classes.samples": self.samples, "classes.right": self.right}
        counts |= {} if self.confusion is None else {"classes.confusion": self.confusion.ravel()}
        return {name: array.astype(np.float64) for name, array in counts.items()}

    def of_all_ranks(self, total: Sums) -> ClassCounts:
        """Returns the counts of all ranks, from the sums of counts()."""
        # exact: float64 represents integers up to 2**53
        whole = {name: np.rint(total[name]).astype(np.int64) for name in self.counts()}
        confusion = (
            None
            if self.confusion is None
            else whole["classes.confusion"].reshape(self.classes, self.classes)
        )
        return ClassCounts(whole["classes.samples"], whole["classes.right"], confusion)
