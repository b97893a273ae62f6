"""What a model says about samples of a run's task as rows of a table: classes, next tokens, numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.cli.evaluate.results import name_of
from hvdtrain.config.schema import Config
from hvdtrain.tasks.classification.build import Classification
from hvdtrain.tasks.functions.measured import Measured
from hvdtrain.tasks.language.build import Language


class Said(NamedTuple):
    """How outputs become rows."""

    head: Callable[[int], list[str]]  # of so many numbers of a sample
    numbers: Callable[[np.ndarray], np.ndarray]  # outputs (n, ...) -> (n, numbers)
    row: Callable[[Sequence[Any]], list[str]]  # of a sample's numbers


def said(task: Any, config: Config) -> Said:
    """The most probable class, or token that comes next, with its probability; of all else the outputs."""
    task = task.task if isinstance(task, Measured) else task
    is_softmax, names = config.model.loss == "cross_entropy", config.data.class_names
    if isinstance(task, Classification):
        return Said(
            lambda numbers: ["class", "probability"],
            lambda outputs: best(outputs.astype(np.float64), is_softmax),
            lambda numbers: [name_of(int(numbers[0]), names), f"{numbers[1]:.6f}"],
        )
    if isinstance(task, Language):
        return Said(
            lambda numbers: ["token", "probability"],
            lambda outputs: best(outputs[:, -1].astype(np.float64), is_softmax=True),
            lambda numbers: [str(int(numbers[0])), f"{numbers[1]:.6f}"],
        )
    return Said(
        lambda numbers: ["prediction"] if numbers == 1 else [f"prediction_{number + 1}" for number in range(numbers)],
        lambda outputs: outputs.reshape(len(outputs), -1),
        lambda numbers: [str(number) for number in numbers],
    )


def best(logits: np.ndarray, is_softmax: bool) -> np.ndarray:
    """float64 (n, 2): the class with the largest logit, and its probability; without softmax that logit."""
    label = logits.argmax(1)
    largest = logits[np.arange(len(logits)), label]
    if is_softmax:
        largest = 1 / np.exp(logits - largest[:, None]).sum(1)
    return np.stack([label.astype(np.float64), largest], 1)
