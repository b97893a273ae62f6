"""Points: the loss and the sums of a regression from its errors, for arrays of any framework."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from hvdtrain.tasks.maps import Maps
from hvdtrain.tasks.task import Each

RegressionLoss = Literal["squared_error", "absolute_error"]
Numbers = TypeVar("Numbers", bound=Any)  # an array of NumPy, torch or JAX


@dataclass(frozen=True)
class Points:
    """The numbers that a regression predicts for a sample: channels of maps, each with its points;
    or outputs, each with one point."""

    shape: tuple[int, ...]  # of y
    maps: Maps | None
    loss: RegressionLoss
    has_gaps: bool = False  # whether targets may be NaN: such points are in no loss and no sum
    # of each point, float64 with mean 1, in a shape that broadcasts to (H, W)
    weights: np.ndarray | None = None

    @property
    def channels(self) -> int:
        return math.prod(self.shape) if self.maps is None else self.maps.y.channel_count

    @property
    def of_channel(self) -> int:
        """The number of points of a channel."""
        return 1 if self.maps is None else self.maps.points

    @property
    def sums(self) -> dict[str, int]:
        names = ("residual", "target", "target_square", *["points"] * self.has_gaps)
        return {
            "loss": 0,
            "squares": 0,
            "absolute": 0,
            **dict.fromkeys(names, self.channels),
        }

    def by_channel(self, y: Numbers) -> Numbers:
        """Converts y (n, ...) in the layout of the data to (n, channels, points); n may be 0."""
        if self.maps is not None:
            return self.maps.by_channel(y)
        found: Numbers = y.reshape(len(y), self.channels, 1)
        return found

    @property
    def point_weights(self) -> np.ndarray | None:
        """Returns the weights, float64 (points,), in the order of by_channel()."""
        if self.weights is None or self.maps is None:
            return None
        turned = self.weights.T if self.maps.y.channels == "last" else self.weights
        pixels = self.maps.y.pixels
        shape = pixels[::-1] if self.maps.y.channels == "last" else pixels
        return np.broadcast_to(turned, shape).reshape(-1)

    @property
    def output_weights(self) -> np.ndarray | float:
        """Returns the weights in the order of flat outputs, float64 (outputs,); 1 without any."""
        if self.weights is None or self.maps is None:
            return 1.0
        is_last = self.maps.y.channels == "last"
        weights = self.weights[..., None] if is_last else self.weights
        return np.broadcast_to(weights, self.shape).reshape(-1)

    def count(self, y: np.ndarray) -> float:
        """Returns the sum of the weights of the targets that are not NaN."""
        is_there = ~np.isnan(self.by_channel(y))
        if self.weights is None:
            return int(np.count_nonzero(is_there))
        return float((is_there * self.point_weights).sum())

    def each(
        self,
        outputs: Numbers,
        target: Numbers,
        target_mean: Numbers,
        xp: Any,
        weights: Numbers | None = None,
    ) -> Each:
        """Returns the loss and the sums of each sample: means over its numbers; with gaps sums over
        those that are not NaN, and how many there are.

        outputs, target: in the layout of the data. target_mean: of each channel. xp: the module of
        these arrays. weights: point_weights() among them.
        """
        target = self.by_channel(target)
        centred = target - target_mean[:, None]
        if self.has_gaps:
            is_there = ~xp.isnan(target)
            # no xp.where() with a number, which torch would copy to the device
            error = (self.by_channel(outputs) - xp.nan_to_num(target, nan=0.0)) * is_there
            centred = xp.nan_to_num(centred, nan=0.0)
            points = {"points": _weighted(is_there, weights).sum(2)}
        else:
            error = self.by_channel(outputs) - target
            points = {}
        squares = _weighted(xp.square(error), weights)
        absolute = _weighted(xp.abs(error), weights)
        centred = _wide(centred)
        terms = {
            "squares": self._total(_wide(squares)),
            "absolute": self._total(_wide(absolute)),
            "residual": _wide(squares).sum(2),
            "target": _weighted(centred, weights).sum(2),
            "target_square": _weighted(xp.square(centred), weights).sum(2),
            **points,
        }
        return Each(self._total(squares if self.loss == "squared_error" else absolute), terms)

    def _total(self, values: Numbers) -> Numbers:
        """(n, channels, points) -> (n,): the mean; with gaps the sum."""
        rows = values.reshape(len(values), values.shape[1] * values.shape[2])
        found: Numbers = rows.sum(1) if self.has_gaps else rows.mean(1)
        return found


def _weighted(values: Numbers, weights: Numbers | None) -> Numbers:
    """(n, channels, points) times the weights (points,)."""
    found: Numbers = values if weights is None else values * weights
    return found


def _wide(values: Numbers) -> Numbers:
    """Returns float64 of torch; NumPy computes in the type that it is asked for, and JAX in one."""
    found: Numbers = values.double() if hasattr(values, "double") else values
    return found
