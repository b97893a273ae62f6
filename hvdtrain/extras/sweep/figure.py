"""The figure of a sweep: the objective over each key that has several values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.extras.figures.figure import COLOURS, literal, new_figure, run_style, save_png
from hvdtrain.records.run import RunMetric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 9
_COLUMNS = 3
_MOST_LINES = len(COLOURS)
_LOG_RATIO = 8.0  # ratio of the largest to the smallest value above which an axis is logarithmic


class SweepPoint(NamedTuple):
    """The mean over the seeds, sd NaN of one."""

    values: Mapping[str, str]  # values by key
    mean: float
    sd: float


def draw_sweep(path: Path, title: str, metric: RunMetric, points: Sequence[SweepPoint]) -> str:
    """Writes a PNG; points: the best first. Returns a line for people. Raises UserError as
    save_png()."""
    return save_png(path, lambda: _sweep_figure(title, metric, points), "--out")


def _sweep_figure(title: str, metric: RunMetric, points: Sequence[SweepPoint]) -> Figure:
    """Draws a panel for each key with several values; lines if one other key has few values."""
    keys = list(points[0].values) if points else []
    swept = (
        [key for key in keys if len({point.values[key] for point in points}) > 1][:_MOST_PANELS]
        or keys[:1]
        or [""]
    )
    rows = math.ceil(len(swept) / _COLUMNS)
    columns = min(len(swept), _COLUMNS)
    figure, all_axes = new_figure(
        rows, columns, height=0.6 + 3.2 * rows, width=1.0 + 4.2 * columns, sharey=True
    )
    scale = 100.0 if metric.percent else 1.0
    scaled = [SweepPoint(point.values, scale * point.mean, scale * point.sd) for point in points]
    for axes, key in zip(all_axes, swept, strict=False):
        others = [other for other in swept if other != key]
        _panel(axes, key, others[0] if len(others) == 1 else None, scaled)
    for axes in all_axes[len(swept) :]:
        axes.set_visible(False)
    for axes in all_axes[::columns]:
        axes.set_ylabel(f"{metric.name}{' (%)' if metric.percent else ''}")
    figure.suptitle(f"{literal(title)}; the best has a ring", fontsize=10)
    return figure


def _panel(axes: Axes, key: str, other: str | None, points: Sequence[SweepPoint]) -> None:
    places = _places([point.values.get(key, "") for point in points])
    groups = dict.fromkeys(point.values[other] for point in points) if other is not None else {}
    names = sorted(groups, key=_sorted) if 1 < len(groups) <= _MOST_LINES else []
    if names:
        for index, name in enumerate(names):
            _line(
                axes,
                places,
                key,
                [point for point in points if point.values[str(other)] == name],
                index,
                f"{other}={name}",
            )
        axes.legend(fontsize=8, facecolor="#FFFFFF", edgecolor="none", framealpha=0.85)
    elif other is None and len(points[:1]) and len(points[0].values) == 1:
        _line(axes, places, key, points, 0, None)
    else:
        axes.plot(
            [places[point.values.get(key, "")] for point in points],
            [point.mean for point in points],
            "o",
            color=COLOURS[0],
            ms=4,
        )
    if points:
        # the best
        axes.plot(
            places[points[0].values.get(key, "")],
            points[0].mean,
            "o",
            mfc="none",
            mec="#000000",
            ms=11,
            zorder=4,
        )
    _name_axis(axes, key, places)


def _line(
    axes: Axes,
    places: Mapping[str, float],
    key: str,
    points: Sequence[SweepPoint],
    index: int,
    label: str | None,
) -> None:
    ordered = sorted(points, key=lambda point: places[point.values[key]])
    x = [places[point.values[key]] for point in ordered]
    y = [point.mean for point in ordered]
    sd = [point.sd if math.isfinite(point.sd) else 0.0 for point in ordered]
    axes.errorbar(
        x,
        y,
        yerr=sd if any(sd) else None,
        marker="o",
        ms=4,
        capsize=3,
        label=literal(label) if label else None,
        **run_style(index),
    )


def _places(texts: Sequence[str]) -> dict[str, float]:
    """Returns the position of each value on its axis: its number, or the place in the list."""
    numbers = {text: _number(text) for text in texts}
    if all(math.isfinite(value) for value in numbers.values()):
        return numbers
    return {text: float(index) for index, text in enumerate(sorted(numbers, key=_sorted))}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _sorted(text: str) -> tuple[bool, float, str]:
    value = _number(text)
    return (not math.isfinite(value), value if math.isfinite(value) else 0.0, text)


def _name_axis(axes: Axes, key: str, places: Mapping[str, float]) -> None:
    axes.set_xlabel(literal(key))
    if any(_number(text) != place for text, place in places.items()):
        axes.set_xticks(list(places.values()), [literal(text) for text in places])
        return
    values = sorted(places.values())
    if values and values[0] > 0 and values[-1] >= _LOG_RATIO * values[0]:
        axes.set_xscale("log")
    if len(places) <= 6:
        axes.minorticks_off()
        axes.set_xticks(values, [literal(text) for text in sorted(places, key=places.__getitem__)])
