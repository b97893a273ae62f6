"""Rows: converts a model's outputs for samples to rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.errors import short


class Rows(NamedTuple):
    """The columns of a table, and the conversion of outputs to its rows."""

    head: Callable[[int], list[str]]  # column names for this many numbers per sample
    # outputs (n, ...), lengths of padded samples -> (n, numbers)
    numbers: Callable[[np.ndarray, np.ndarray | None], np.ndarray]
    row: Callable[[Sequence[Any]], list[str]]  # converts a sample's numbers to cells


def rows_of_numbers() -> Rows:
    """Returns columns with the outputs themselves."""
    return Rows(
        lambda numbers: (
            ["prediction"]
            if numbers == 1
            else [f"prediction_{number + 1}" for number in range(numbers)]
        ),
        lambda outputs, lengths: outputs.reshape(len(outputs), -1),
        lambda numbers: [str(number) for number in numbers],
    )


MOST_COLUMNS = 100  # classes with a column each


def rows_of_classes(is_softmax: bool, names: Sequence[str] | None) -> Rows:
    """The class with the largest output, its probability, and the probability of each class (up to
    MOST_COLUMNS classes); without softmax, outputs instead of probabilities."""
    kind = "p" if is_softmax else "output"
    return Rows(
        lambda numbers: [
            "class",
            "probability",
            *(f"{kind}_{name_of_class(label, names)}" for label in range(numbers - 2)),
        ],
        lambda outputs, lengths: _of_classes(outputs.astype(np.float64), is_softmax),
        lambda numbers: [
            name_of_class(int(numbers[0]), names),
            *(f"{number:.6f}" for number in numbers[1:]),
        ],
    )


def _of_classes(logits: np.ndarray, is_softmax: bool) -> np.ndarray:
    """Returns float64 (n, 2 + classes): best(), and the probability of each class, or its logit
    without softmax; (n, 2) for more than MOST_COLUMNS classes."""
    largest = best(logits, is_softmax)
    if logits.shape[1] > MOST_COLUMNS:
        return largest
    each = logits
    if is_softmax:
        each = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
        each /= each.sum(1, keepdims=True)
    return np.concatenate([largest, each], 1)


def rows_of_tokens() -> Rows:
    """Returns columns with the most probable next token, and its probability."""
    return Rows(
        lambda numbers: ["token", "probability"],
        lambda outputs, lengths: best(_last(outputs, lengths).astype(np.float64), is_softmax=True),
        lambda numbers: [str(int(numbers[0])), f"{numbers[1]:.6f}"],
    )


def rows_of_pixels() -> Rows:
    """Returns columns with the class of each pixel."""
    return Rows(
        lambda numbers: [f"pixel_{number}" for number in range(numbers)],
        lambda outputs, lengths: outputs.argmax(1).reshape(len(outputs), -1),
        lambda numbers: [str(int(number)) for number in numbers],
    )


def name_of_class(label: int, class_names: Sequence[str] | None) -> str:
    """Returns the name of a class, or its number if it has no name."""
    return short(class_names[label], 60) if class_names and label < len(class_names) else str(label)


def _last(outputs: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """Selects from outputs (n, T, V) the output (n, V) that predicts the last token of each sample,
    or the next token for a sample of one token."""
    return (
        outputs[:, -1]
        if lengths is None
        else outputs[np.arange(len(outputs)), np.maximum(lengths - 2, 0)]
    )


def best(logits: np.ndarray, is_softmax: bool) -> np.ndarray:
    """Returns float64 (n, 2): the class with the largest logit, and its probability; without
    softmax, that logit."""
    label = logits.argmax(1)
    largest = logits[np.arange(len(logits)), label]
    if is_softmax:
        largest = 1 / np.exp(logits - largest[:, None]).sum(1)
    return np.stack([label.astype(np.float64), largest], 1)
