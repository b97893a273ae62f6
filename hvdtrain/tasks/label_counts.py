"""What is counted of labels and classes, in any framework: rightly said, wrongly said and missed, among the first, in bins; and losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


def edges_of_bins(bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Where bins of probabilities begin and end, float64 (bins,) each; the last one has 1 in it."""
    lower = np.arange(bins) / max(bins, 1)
    return lower, np.append(lower[1:], np.inf)[:bins]


def terms(logits: Any, probabilities: Any, y: Any, edges: tuple[Any, Any]) -> dict[str, Any]:
    """The terms of Multilabel.sums, in any framework: logits and probabilities (n, labels), y bool (n, labels), edges (bins,)."""
    said, (lower, upper) = logits > 0, edges
    found = {"true_positives": said & y, "false_positives": said & ~y, "false_negatives": ~said & y}
    if not len(lower):
        return found
    is_in = (probabilities[..., None] >= lower) & (probabilities[..., None] < upper)  # (n, labels, bins)
    shape = len(y), y.shape[1] * len(lower)
    return found | {"positives_by_bin": (is_in & y[..., None]).reshape(shape), "all_by_bin": is_in.reshape(shape)}


class LossForm(NamedTuple):
    """How the loss of a sample with a class is made, and which metrics are beside it."""

    squared_error: bool  # else cross-entropy
    smoothing: float  # share of the label that is spread over all classes in training (Szegedy et al. 2015, arXiv:1512.00567, section 7)
    class_weights: tuple[float, ...] | None = None
    top_k: int | None = None


def right_terms(logits: Any, labels: Any, top_k: int | None) -> dict[str, Any]:
    """Whether the largest output is the class, bool (n,); and whether fewer than top_k outputs are larger than its, or no number."""
    found = {"right": logits.argmax(1) == labels}
    if top_k is None:
        return found
    of_class = logits[np.arange(len(labels)), labels][:, None]
    return found | {"among_top": (~(logits <= of_class)).sum(1) < top_k}
