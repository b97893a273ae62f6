"""task.weights: the weight of each point of a map in the loss and the metrics of a regression."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.tasks.maps import Maps

KEY = "task.weights"
_COSINE = re.compile(r"cos\((.+)\)")
_FIX = "one number of 0 or more for each row of the maps; or cos(NAME), of an array of latitudes"


def point_weights(asked: str | Sequence[float], train: Source, maps: Maps | None) -> np.ndarray:
    """Returns float64 with mean 1, (H, 1), (1, W) or (H, W).

    asked: numbers; the name of an array in the files of the data; or the cosine of one, in degrees.
    Raises UserError if there is none, or it does not fit the maps.
    """
    if maps is None:
        what = f"{KEY}={_shown(asked)} needs maps x (C, H, W) or (H, W, C) with y of the same H, W"
        raise UserError(what, KEY, "leave it out")
    if isinstance(asked, str):
        cosine = _COSINE.fullmatch(asked.strip())
        values = _array_of(cosine[1] if cosine else asked, train)
        values = _cosine(values, asked) if cosine else values
    else:
        values = np.array(asked, np.float64)
    if values.ndim == 0 or not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise UserError(f"{KEY}={_shown(asked)} are not weights", KEY, _FIX)
    weights = _over_map(values, maps.y.pixels)
    if weights is None:
        height, width = maps.y.pixels
        what = f"{KEY}={_shown(asked)} is of shape {values.shape}, but maps have {height}x{width}"
        raise UserError(f"{what} points", KEY, _FIX)
    return weights / np.broadcast_to(weights, maps.y.pixels).mean()


def _array_of(name: str, train: Source) -> np.ndarray:
    found = train.known_array(name.strip())
    if found is None:
        raise UserError(
            f"{KEY} names {name.strip()}, but the data are not in a file with such an array",
            KEY,
            "the numbers themselves: task.weights=[0.1,0.5,1.0]",
        )
    if found.dtype.kind not in "iuf":
        raise UserError(f"{KEY} names {name.strip()}, which has no numbers", KEY, _FIX)
    return found.astype(np.float64)


def _cosine(degrees: np.ndarray, asked: str) -> np.ndarray:
    """Raises UserError for numbers outside -90 to 90."""
    if not np.isfinite(degrees).all() or (np.abs(degrees) > 90.0).any():
        what = f"{KEY}={asked} takes degrees of latitude, from -90 to 90"
        raise UserError(what, KEY, "the name of such an array")
    # at a pole the cosine is 6e-17 or, by rounding, below 0
    return np.maximum(np.cos(np.deg2rad(degrees)), 0.0)


def _over_map(values: np.ndarray, pixels: tuple[int, int]) -> np.ndarray | None:
    """Returns the values in a shape that broadcasts to (H, W); None if they do not fit."""
    if values.shape == pixels:
        return values
    if values.shape == pixels[:1]:
        return values[:, None]
    return values[None] if values.shape == pixels[1:] else None


def weights_of_facts(facts: Any, maps: Maps | None) -> np.ndarray:
    """Rebuilds the weights of a checkpoint. Raises TypeError or ValueError if they do not fit."""
    found = np.array(facts, np.float64)
    height, width = (0, 0) if maps is None else maps.y.pixels
    if found.shape not in ((height, 1), (1, width), (height, width)):
        raise ValueError("impossible weights")
    if not (np.isfinite(found) & (found >= 0)).all() or not found.any():
        raise ValueError("impossible weights")
    return found


def note_on_weights(asked: str | Sequence[float], weights: np.ndarray) -> str:
    """Returns a line for the header."""
    by = {(True, False): "row", (False, True): "column"}.get(
        (weights.shape[1] == 1, weights.shape[0] == 1), "point"
    )
    return (
        f"{KEY}={_shown(asked)}: loss and metrics weight each {by} of the maps, by "
        f"{weights.min():.3g} to {weights.max():.3g} of the mean"
    )


def _shown(asked: str | Sequence[float]) -> str:
    if isinstance(asked, str):
        return asked
    first = ",".join(f"{number:g}" for number in asked[:3])
    return f"[{first}{',...' if len(asked) > 3 else ''}]"
