"""Points around trained weights: lines, filter-normalized directions, boxes. No framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from hvdtrain.core.arrays import Arrays

# what a step of the search moves by, as a share of the box; and how many steps it makes
STEP = 0.25
STEPS = 10
AROUND = np.linspace(-1.0, 1.0, 21)
BETWEEN = np.linspace(-0.5, 1.5, 21)


class Sharpness(NamedTuple):
    """How much the loss rises in a small box around weights."""

    percent: float  # 100 (largest - loss) / (1 + loss)
    loss: float  # at the weights
    largest: float  # that the search found in the box


def between(first: Arrays, second: Arrays, share: float) -> Arrays:
    """Returns (1 - share) first + share second; integers, such as counters, are those of the
    first. Running statistics are interpolated too."""
    return {
        name: (
            (1.0 - share) * array + share * second[name]
            if np.issubdtype(array.dtype, np.floating)
            else array
        ).astype(array.dtype)
        for name, array in first.items()
    }


def filter_normalized(weights: Arrays, rng: np.random.Generator) -> Arrays:
    """Returns a random direction, in which each filter is as long as the filter of the weights.

    A filter is a row of an array with at least two dimensions: the weights of one output. Arrays
    with fewer dimensions, such as biases and norms, and buffers do not move. Source: Li et al.
    2018, arXiv:1712.09913, section 4: d_ij = d_ij / |d_ij| |w_ij|, for d_ij normal.
    """
    found = {}
    for name, array in weights.items():
        if not name.startswith("p.") or array.ndim < 2:
            continue
        drawn = rng.standard_normal(array.shape)
        rows = (len(array), -1)
        length = np.linalg.norm(array.reshape(rows).astype(np.float64), axis=1)
        scale = length / np.maximum(np.linalg.norm(drawn.reshape(rows), axis=1), 1e-300)
        found[name] = (drawn * scale.reshape(-1, *[1] * (array.ndim - 1))).astype(array.dtype)
    return found


def along(weights: Arrays, direction: Arrays, distance: float) -> Arrays:
    """Returns weights + distance direction."""
    return weights | {
        name: (weights[name] + distance * array).astype(array.dtype)
        for name, array in direction.items()
    }


def sharpness(
    weights: Arrays,
    epsilon: float,
    loss: Callable[[Arrays], float],
    gradient: Callable[[Arrays], Mapping[str, np.ndarray]],
) -> Sharpness:
    """Returns 100 (max of loss(y) - loss(x)) / (1 + loss(x)), where each number y of the weights is
    at most epsilon (|x| + 1) from x.

    Source: Keskar et al. 2017, arXiv:1609.04836, eq. 3 and 4 with A the identity. Deviation: they
    maximize by 10 iterations of L-BFGS-B; here, 10 steps of the sign of the gradient, each a
    quarter of the box, which end in its corners. The largest loss of any step counts, so the
    result is a lower bound, as theirs.
    """
    trained = [name for name in weights if name.startswith("p.")]
    box = {name: epsilon * (np.abs(weights[name]) + 1.0) for name in trained}
    first = largest = loss(weights)
    at = dict(weights)
    for _ in range(STEPS):
        slope = gradient(at)
        for name in trained:
            moved = at[name] + STEP * box[name] * np.sign(slope[name])
            low = weights[name] - box[name]
            high = weights[name] + box[name]
            at[name] = np.clip(moved, low, high).astype(weights[name].dtype)
        largest = max(largest, loss(at))
    return Sharpness(100.0 * (largest - first) / (1.0 + first), first, largest)
