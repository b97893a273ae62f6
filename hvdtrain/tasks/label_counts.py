"""Counts of labels and classes, in any framework: right, wrong and missed predictions, top-k,
histograms of probabilities, and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.data.source import Source, arrays_in_memory
from hvdtrain.data.subset import Subset
from hvdtrain.tasks.transform import without_stats


def edges_of_bins(bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds of the bins of probabilities, two arrays float64 (bins,); the last bin
    includes 1."""
    lower = np.arange(bins) / max(bins, 1)
    return lower, np.append(lower[1:], np.inf)[:bins]


def terms(logits: Any, probabilities: Any, y: Any, edges: tuple[Any, Any]) -> dict[str, Any]:
    """Computes the terms of Multilabel.sums in any framework, from logits and probabilities (n,
    labels), y bool (n, labels) and edges (bins,)."""
    said, (lower, upper) = logits > 0, edges
    terms_by_name = {
        "true_positives": said & y,
        "false_positives": said & ~y,
        "false_negatives": ~said & y,
    }
    if not len(lower):
        return terms_by_name
    # (n, labels, bins)
    is_in = (probabilities[..., None] >= lower) & (probabilities[..., None] < upper)
    shape = len(y), y.shape[1] * len(lower)
    return terms_by_name | {
        "positives_by_bin": (is_in & y[..., None]).reshape(shape),
        "all_by_bin": is_in.reshape(shape),
    }


class LossForm(NamedTuple):
    """How the loss of a sample with a class is computed, and which metrics go with it."""

    squared_error: bool  # else cross-entropy
    # label smoothing: share of the label spread over all classes in training (Szegedy et al. 2015,
    # arXiv:1512.00567, section 7)
    smoothing: float
    class_weights: tuple[float, ...] | None = None
    top_k: int | None = None


def right_terms(logits: Any, labels: Any, top_k: int | None) -> dict[str, Any]:
    """Returns, bool (n,) each, whether the largest output is the class, and whether fewer than
    top_k outputs are larger than the class's output or NaN."""
    terms_by_name = {"right": logits.argmax(1) == labels}
    if top_k is None:
        return terms_by_name
    of_class = logits[np.arange(len(labels)), labels][:, None]
    return terms_by_name | {"among_top": (~(logits <= of_class)).sum(1) < top_k}


class Operations(NamedTuple):
    """What task.metrics needs of a framework."""

    array: Callable[[np.ndarray], Any]  # on the device of the model
    logits: Callable[[Any], Any]  # of a model's outputs, without their gradient
    confidence: Callable[[Any], Any]  # logits (n, outputs) -> the largest probability (n,)
    on_host: Callable[[Any], np.ndarray]
    can_copy: Callable[[Any], bool]  # whether each() may copy these logits to the host


def softmax(logits: np.ndarray) -> np.ndarray:
    """Computes the probabilities of logits (n, outputs), in their dtype."""
    shares = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
    probabilities: np.ndarray = shares / shares.sum(1, keepdims=True)
    return probabilities


_MOST_LABELS = 2**26  # labels checked before a job starts: takes a third of a second
_SHOWN = 5  # ranges shown in a message


def notes_on_gaps(train: Source, name: str, classes: int, ignored: int | None) -> list[str]:
    """Returns a note if training labels in memory skip classes of the model, for example 11 to 254
    before 255.

    name: the task's name; its labels are classes of samples or pixels, or columns of zeros and
    ones.
    """
    found = _labels_in_memory(train)
    if found is None or not len(found[0]):
        return []
    labels, are_all = found
    if name == "multilabel":
        counts = np.count_nonzero(labels, axis=0)
    else:
        counts = np.bincount(
            labels[(labels >= 0) & (labels < classes)].reshape(-1).astype(np.int64),
            minlength=classes,
        )
    present: np.ndarray = np.asarray(counts) > 0
    if ignored is not None and 0 <= ignored < len(present):
        present[ignored] = True
    missing = np.flatnonzero(~present)
    if not len(missing):
        return []
    unit = {"multilabel": "sample has", "segmentation": "pixel is of"}.get(name, "sample is of")
    kind = "label" if name == "multilabel" else "class"
    if name == "classification" and missing.tolist() == [0]:  # notes_on_labels() reports this
        return []
    looked_at = "" if are_all else f" (of the {len(labels):,} samples looked at)"
    line = (
        f"no {unit} {kind} {_ranges(missing)}{looked_at}: the model has an output for each of "
        f"{classes:,}"
    )
    last = classes - 1
    if name != "multilabel" and ignored is None and missing[-1] == last - 1:
        line += f"; task.ignore_label={last} if {last} stands for no class"
    return [line]


def _labels_in_memory(source: Source) -> tuple[np.ndarray, bool] | None:
    """Returns labels y (n, ...), all of them or an evenly spaced selection; None if reading them
    would require reading samples."""
    labels = source.known_labels()
    if labels is not None:
        return labels, True
    whole = without_stats(source)
    arrays = arrays_in_memory(whole.source if isinstance(whole, Subset) else whole)
    if arrays is None or "y" not in arrays or arrays["y"].dtype.kind not in "iub":
        return None
    y = arrays["y"]
    most = max(1, _MOST_LABELS // max(1, math.prod(y.shape[1:])))
    return (
        (y, True)
        if len(y) <= most
        else (y[np.linspace(0, len(y) - 1, most).astype(np.int64)], False)
    )


def _ranges(numbers: np.ndarray) -> str:
    """Formats numbers as ranges: 3, 5 to 9 and 4 more."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    shown = [
        f"{part[0]} to {part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts[:_SHOWN]
    ]
    more = sum(len(part) for part in parts[_SHOWN:])
    return ", ".join(shown) + (f" and {more} more" if more else "")
