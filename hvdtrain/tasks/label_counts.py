"""Which labels of a sample are rightly said, wrongly said and missed, and in which bins their probabilities are, in any framework."""

from __future__ import annotations

from typing import Any

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
