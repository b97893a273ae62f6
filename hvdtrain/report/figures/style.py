"""How the figures of a report look: colours, axes, legends, and lines of few enough points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart, with a dash for each: lines may lie on each other.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
GREY = "#777777"
WIDTH, HEIGHT = 5.6, 3.4  # inches: small, so that letters stay readable on a narrow screen
MOST_POINTS = 2000  # of a line
_MEANS = 200


def new(rows: int = 1, columns: int = 1, height: float = HEIGHT, width: float = WIDTH, **shared: Any) -> tuple[Figure, list[Axes]]:
    """An empty figure and its axes; never pyplot: it would look for a screen, and keep the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in places:
        axes.grid(color="#DDDDDD", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure, places


def look(place: int) -> dict[str, Any]:
    """Colour and dash of the run in this place."""
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)]}


def line(axes: Axes, x: Sequence[float], y: Sequence[float], **kind: Any) -> bool:
    """A line through what is finite, or a point where it has only one; whether there was anything to draw.

    Of very many points a pale line has the peaks, and another the means; what moves in stairs has no noise, and stays as it is.
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(points) == 1:
        kind |= {"marker": kind.get("marker") or "o", "linestyle": "none"}
    if len(points) > MOST_POINTS and "drawstyle" in kind:
        points = list(zip(*thin(points), strict=True))
    elif len(points) > MOST_POINTS:
        axes.plot(*thin(points), **kind | {"alpha": 0.35, "linewidth": 0.7, "linestyle": "-", "marker": ""})
        points = _means(points)
        kind |= {"alpha": 1.0, "linewidth": 1.4}
    if points:
        axes.plot(*zip(*points, strict=True), **kind)
    return bool(points)


def _means(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of stretches of equally many points."""
    cuts = [len(points) * place // _MEANS for place in range(_MEANS + 1)]
    stretches = [points[a:b] for a, b in itertools.pairwise(cuts)]
    return [(fmean(x for x, _ in stretch), fmean(y for _, y in stretch)) for stretch in stretches]


def thin(points: list[tuple[float, float]], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """At most so many points: of each stretch the lowest and the highest, so that no peak is lost."""
    if len(points) > most:
        stretches = most // 2
        cuts = [len(points) * place // stretches for place in range(stretches + 1)]
        ends = [_extremes(points, range(*pair)) for pair in itertools.pairwise(cuts)]
        points = [points[place] for pair in ends for place in pair]
    return [point[0] for point in points], [point[1] for point in points]


def _extremes(points: list[tuple[float, float]], places: range) -> list[int]:
    """Where the lowest and the highest are, in order."""
    low, high = (best(places, key=lambda place: points[place][1]) for best in (min, max))
    return sorted({low, high})


def legend(figure: Figure, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Below the axes: (label, how its line looks). A figure with many runs grows with its legend."""
    from matplotlib.lines import Line2D

    if not entries:
        return
    names = [plain(label) for label, _ in entries]
    longest = max(map(len, names))
    columns = min(len(entries), 4 if longest <= 11 else 3 if longest <= 17 else 2 if longest <= 30 else 1)
    figure.set_figheight(figure.get_figheight() + 0.18 * -(-len(entries) // columns))
    handles = [Line2D([], [], **{"linewidth": 1.8, **kind}) for _, kind in entries]
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)


def runs(labels: Sequence[str], **kind: Any) -> list[tuple[str, dict[str, Any]]]:
    """The legend's entries for several runs; none for one, which the title names."""
    return [(label, look(place) | kind) for place, label in enumerate(labels)] if len(labels) > 1 else []


def plain(text: str) -> str:
    """A text that matplotlib shows as it is: no formula between dollars, and no name that a legend leaves out."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def heights(axes: Axes) -> list[float]:
    """All y of the lines that are drawn."""
    drawn: list[Any] = [line.get_ydata() for line in axes.lines]
    return [float(value) for values in drawn for value in values]


def whole(*sides: Any) -> None:
    """Ticks at whole numbers only, of such axes as axes.xaxis."""
    from matplotlib.ticker import MaxNLocator

    for side in sides:
        side.set_major_locator(MaxNLocator(integer=True))


def powers_of_ten(axes: Axes) -> None:
    """With plain numbers; between the powers too where there are few of those."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    values = heights(axes)
    few = max(values) < 100 * min(values)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:,g}" if few else NullFormatter())
    axes.tick_params(which="minor", labelsize=9)


def clock(seconds: float) -> tuple[float, str]:
    """In how many seconds, and in which unit, a job of this length is best told."""
    return (3600.0, "h") if seconds > 2 * 3600 else (60.0, "min") if seconds > 2 * 60 else (1.0, "s")


def from_zero(axes: Axes) -> None:
    """The axis begins at 0 and ends above the lines."""
    axes.set_ylim(0, 1.08 * max(heights(axes), default=1.0) or 1.0)
