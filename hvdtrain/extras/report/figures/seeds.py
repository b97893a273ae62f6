"""The curves of runs that differ only in the seed: their mean, with a band of one standard
deviation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.extras.report.figures.canvas import MOST_POINTS, Point, draw_line, section_means

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAND_ALPHA = 0.22  # times that of the line
_THIN: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.6, "linestyle": "-", "marker": ""}


class MeanCurve(NamedTuple):
    """The mean over several curves, by x; empty if there is no x where all have values."""

    x: list[float]
    mean: list[float]
    sd: list[float]  # of the sample


def finite_points(x: Sequence[float], y: Sequence[float]) -> list[Point]:
    """Returns the points whose coordinates are both finite, by x."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    return sorted(points, key=lambda point: point[0])


def mean_curve(curves: Sequence[Sequence[Point]]) -> MeanCurve:
    """Computes the mean and the deviation at each x of any curve, where all curves have values;
    values between the points of a curve are interpolated linearly. curves: at least two, none
    empty."""
    import numpy as np

    first = max(curve[0][0] for curve in curves)
    last = min(curve[-1][0] for curve in curves)
    x = sorted({a for curve in curves for a, _ in curve if first <= a <= last})
    values = np.array(  # (curves, x)
        [np.interp(x, [a for a, _ in curve], [b for _, b in curve]) for curve in curves]
    )
    return MeanCurve(x, values.mean(0).tolist(), values.std(0, ddof=1).tolist())


def draw_mean(axes: Axes, curves: Sequence[Sequence[Point]], **style: Any) -> int:
    """Draws the mean of the curves with a band, or the curve itself if there is only one; returns
    the number of curves that have a point.

    Where a curve ends before the others, the band ends too, and the others continue as thin lines.
    """
    curves = [curve for curve in curves if curve]
    if len(curves) == 1:
        draw_line(axes, *zip(*curves[0], strict=True), **style)
    elif curves:
        mean = mean_curve(curves)
        _draw_band(axes, mean, min(y for curve in curves for _, y in curve), style)
        draw_line(axes, mean.x, mean.mean, **style)
        for curve in curves:
            rest = [point for point in curve if not mean.x or point[0] >= mean.x[-1]]
            if not mean.x or len(rest) > 1:
                draw_line(axes, *zip(*rest, strict=True), **style | _THIN)
    return len(curves)


def _draw_band(axes: Axes, curve: MeanCurve, lowest: float, style: dict[str, Any]) -> None:
    """Draws the band, or an error bar for a single point. If all values are positive, a band that
    would reach 0 ends at the lowest of them: a logarithmic axis would draw it down to its end."""
    colour = style["color"]
    zorder = style.get("zorder", 2)
    if len(curve.x) == 1:
        axes.errorbar(
            curve.x, curve.mean, curve.sd, fmt="none", ecolor=colour, capsize=3, zorder=zorder
        )
    elif curve.x:
        points = list(zip(curve.x, curve.mean, curve.sd, strict=True))
        low = _shortened(
            [(x, mean - sd if mean > sd or lowest <= 0 else lowest) for x, mean, sd in points]
        )
        high = _shortened([(x, mean + sd) for x, mean, sd in points])
        axes.fill_between(
            [x for x, _ in low],
            [y for _, y in low],
            [y for _, y in high],
            color=colour,
            zorder=zorder,
            alpha=_BAND_ALPHA * style.get("alpha", 1.0),
            linewidth=0,
        )


def _shortened(points: Sequence[Point]) -> Sequence[Point]:
    """Returns the points, or the means of sections of a long line."""
    return points if len(points) <= MOST_POINTS else section_means(points)
