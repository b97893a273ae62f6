"""ROC and precision-recall curves of scores."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Curve(NamedTuple):
    """A line through points, float64 (points,) each."""

    x: np.ndarray
    y: np.ndarray


def roc_curve(scores: np.ndarray, is_positive: np.ndarray) -> Curve:
    """Computes the share of others (x) and of positives (y) with a score above each threshold, from
    (0, 0) to (1, 1)."""
    positives, others = _above(scores, is_positive)
    return Curve(
        np.append(0.0, others / max(others[-1], 1.0)),
        np.append(0.0, positives / max(positives[-1], 1.0)),
    )


def precision_recall_curve(scores: np.ndarray, is_positive: np.ndarray) -> Curve:
    """Computes recall (x) and precision (y) at each threshold, from the highest."""
    positives, others = _above(scores, is_positive)
    return Curve(positives / max(positives[-1], 1.0), positives / (positives + others))


def _above(scores: np.ndarray, is_positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts the positive and the other samples with at least each score, from the highest."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    positives = np.bincount(inverse, is_positive, len(counts))[::-1]
    return np.cumsum(positives), np.cumsum(counts[::-1] - positives)


def thinned(curve: Curve, most: int) -> Curve:
    """Returns at most `most` points of a curve, evenly spaced along its length."""
    if len(curve.x) <= most:
        return curve
    along = np.append(0.0, np.cumsum(np.abs(np.diff(curve.x)) + np.abs(np.diff(curve.y))))
    kept = np.unique(np.searchsorted(along, np.linspace(0.0, along[-1], most)))
    return Curve(curve.x[kept], curve.y[kept])
