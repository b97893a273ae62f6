"""Judges what a job left: pure functions of numbers, and the list of verdicts with their exit
codes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

Verdict = Literal[
    "passed",
    "target missed",
    "too slow",
    "hangs",
    "crashed",
    "no model",
    "wrong model",
    "trained on val.npz",
    "not shared",
]
CODES: dict[Verdict, int] = {  # 1 is a bug of the grader, 2 a mistake in its command
    "passed": 0,
    "target missed": 10,
    "too slow": 11,
    "hangs": 12,
    "crashed": 13,
    "no model": 14,
    "wrong model": 15,
    "trained on val.npz": 16,
    "not shared": 17,
}
MOST_Z = 5.0  # an honest submission exceeds it once in 3.5 million gradings


class Answers(NamedTuple):
    """What a model says to one set of samples."""

    right: np.ndarray  # bool (n,)
    loss: np.ndarray  # float64 (n,): cross-entropy

    @property
    def accuracy(self) -> float:
        return float(self.right.mean())


def seen_z(given: np.ndarray, hidden: np.ndarray) -> float:
    """By how many standard deviations the losses of given samples rank below those of hidden ones:
    Wilcoxon's rank sum.

    given (n,) and hidden (m,) are a random division of one set. So for a model that has learned
    from neither, whatever it is, the result has mean 0 and deviation 1 (less where losses are
    equal; those share the mean of their ranks).
    """
    n = len(given)
    m = len(hidden)
    _, which, counts = np.unique(
        np.concatenate([given, hidden]), return_inverse=True, return_counts=True
    )
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[which]  # from 1
    return float((n * (n + m + 1) / 2 - ranks[:n].sum()) / np.sqrt(n * m * (n + m + 1) / 12))


def judge(given: Answers, hidden: Answers, target: float) -> tuple[Verdict, str]:
    """The verdict on a model, and why."""
    z = seen_z(given.loss, hidden.loss)
    shown = (
        f"accuracy {hidden.accuracy:.4f} on {len(hidden.right):,} hidden samples, "
        f"{given.accuracy:.4f} on val.npz"
    )
    if z > MOST_Z:
        return (
            "trained on val.npz",
            f"{shown}; its losses are lower on val.npz by {z:.1f} standard deviations, at most "
            f"{MOST_Z:g} can be chance",
        )
    if hidden.accuracy < target:
        return "target missed", f"{shown}; the target is {target:g}"
    return "passed", f"{shown}; the target is {target:g}"
