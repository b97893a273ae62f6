"""What the figures of a report share: legends, lines with a bounded number of points, marks of
resumes, and output as SVG."""

from __future__ import annotations

import base64
import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.extras.figures.figure import GREY, LineStyle, drawn_values, literal, render, run_style
from hvdtrain.extras.report.measures.groups import RunGroup
from hvdtrain.records.run import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_POINTS = 2000  # points in a line
_ROW_LETTERS = 26  # in a line of the name of a row
_MEANS = 200  # points in the line of means that is drawn over a longer line
LegendEntry = tuple[str, LineStyle]
Point = tuple[float, float]
MEAN_OF_SEEDS = "mean of {} seeds, sd shaded"  # what a figure draws of a group of runs
EACH_SEED = "{} seeds"
LARGEST_SVG_BYTES = 400_000  # in a page, a larger figure becomes a PNG


class TimeUnit(NamedTuple):
    seconds: float
    name: str


def draw_line(axes: Axes, x: Sequence[float], y: Sequence[float], **style: Any) -> bool:
    """Draws a line through the finite points, or a marker if there is only one; returns whether
    there was anything to draw.

    Above MOST_POINTS points, a pale line shows the extremes and a second line the means; a line
    with a drawstyle (stairs) has no second line.
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not points:
        return False
    if len(points) == 1:
        style |= {"marker": style.get("marker") or "o", "linestyle": "none"}
    if len(points) > MOST_POINTS:
        extremes = downsample(points)
        if "drawstyle" in style:
            points = extremes
        else:
            pale = style | {"alpha": 0.35, "linewidth": 0.7, "linestyle": "-", "marker": ""}
            axes.plot(*zip(*extremes, strict=True), **pale)
            points = section_means(points)
            style |= {"alpha": 1.0, "linewidth": 1.4}
    axes.plot(*zip(*points, strict=True), **style)
    return True


def _sections(points: Sequence[Point], count: int) -> list[range]:
    """Returns the indices of the points in `count` sections of equal length."""
    cuts = [len(points) * section // count for section in range(count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(cuts)]


def section_means(points: Sequence[Point]) -> list[Point]:
    """Returns the mean point of each of _MEANS sections."""
    return [
        (fmean(points[i][0] for i in section), fmean(points[i][1] for i in section))
        for section in _sections(points, _MEANS)
    ]


def downsample(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Reduces to at most `most` points: the lowest and the highest of each section, so that no peak
    is lost."""
    if len(points) <= most:
        return list(points)
    kept: list[Point] = []
    for section in _sections(points, most // 2):
        low = min(section, key=lambda i: points[i][1])
        high = max(section, key=lambda i: points[i][1])
        kept += [points[i] for i in sorted({low, high})]
    return kept


def legend(figure: Figure, entries: Sequence[LegendEntry]) -> None:
    """Adds a legend below the axes; the figure grows with its rows."""
    from matplotlib.lines import Line2D

    if not entries:
        return
    names = [literal(label) for label, _ in entries]
    longest = max(map(len, names))
    columns = min(
        len(entries), 4 if longest <= 11 else 3 if longest <= 17 else 2 if longest <= 30 else 1
    )
    rows = math.ceil(len(entries) / columns)
    figure.set_figheight(figure.get_figheight() + 0.18 * rows)
    handles = [Line2D([], [], **{"linewidth": 1.8, **style}) for _, style in entries]
    figure.legend(
        handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5
    )


def styled(groups: Sequence[RunGroup]) -> Iterator[tuple[RunRecord, LineStyle]]:
    """Yields each run with the style of its group."""
    for index, group in enumerate(groups):
        for run in group.runs:
            yield run, run_style(index)


def group_entries(
    groups: Sequence[RunGroup], note: str, drawn: Sequence[int] = (), **style: Any
) -> list[LegendEntry]:
    """Returns the legend's entries for groups of runs; none for a single run, which the title
    names.

    note: what is drawn of a group of several runs, with {} for their number. drawn: how many runs
    of each group have something to draw, if not all have.
    """
    entries: list[LegendEntry] = []
    for index, group in enumerate(groups):
        count = drawn[index] if drawn else len(group.runs)
        shown = f"{count}" if count == len(group.runs) else f"{count} of {len(group.runs)}"
        of_seeds = note.format(shown) if len(group.runs) > 1 else ""
        if len(groups) > 1:
            name = f"{group.name} ({of_seeds})" if of_seeds else group.name
            entries.append((name, run_style(index) | style))
        elif of_seeds:
            entries.append((of_seeds, run_style(index) | style))
    return entries


# at the axis, where a job was resumed
RESUMED: LineStyle = {
    "marker": "^",
    "markersize": 7,
    "markeredgecolor": "#FFFFFF",
    "markeredgewidth": 0.5,
    "linestyle": "none",
}
_MOST_RESUMES = 200  # marks of a run


def mark_resumes(axes: Axes, x: Sequence[float], colour: str) -> bool:
    """Marks at the bottom of the axes where a job was resumed; returns whether there are any.
    Call it after the axes are scaled: the marks have no y value."""
    first, last = axes.get_xlim()
    known = sorted({value for value in x if first <= value <= last})[-_MOST_RESUMES:]
    if known:
        transform = axes.get_xaxis_transform()
        axes.plot(
            known,
            [0.0] * len(known),
            **RESUMED | {"color": colour},
            transform=transform,
            clip_on=False,
            zorder=5,
        )
    return bool(known)


def resumed_entry(marked: bool) -> list[LegendEntry]:
    """Returns the legend's entry for these marks, if there are any."""
    return [("resumed", RESUMED | {"color": GREY})] if marked else []


class RowNames(NamedTuple):
    """The names of the rows of a figure."""

    texts: list[str]
    height: float  # of a row, in inches


def row_names(labels: Sequence[str]) -> RowNames:
    """Breaks names of runs between keys, so that they leave room for the rows."""
    texts = ["\n".join(textwrap.wrap(label, _ROW_LETTERS)) or label for label in labels]
    lines = max(text.count("\n") + 1 for text in texts)
    return RowNames([literal(text) for text in texts], max(0.34, 0.06 + 0.145 * lines))


def scale_from_zero(axes: Axes) -> None:
    """A y axis that starts at 0 and ends above the lines and bands."""
    top = [value for value in (*drawn_values(axes), axes.dataLim.y1) if math.isfinite(value)]
    axes.set_ylim(0, 1.08 * max(top, default=1.0) or 1.0)


def time_unit(seconds: float) -> TimeUnit:
    """Returns the unit for the time axis of a job of this length."""
    if seconds > 2 * 3600:
        return TimeUnit(3600.0, "h")
    return TimeUnit(60.0, "min") if seconds > 2 * 60 else TimeUnit(1.0, "s")


def svg(figure: Figure) -> bytes:
    """Returns the figure as SVG, without a date, so that a run always gives the same bytes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    return render(
        lambda out: FigureCanvasSVG(figure).print_figure(out, format="svg", metadata={"Date": None})
    )


def data_url(svg_data: bytes, png_data: bytes) -> str:
    """Returns a data: URL of the SVG, or of the PNG if the SVG is larger than LARGEST_SVG_BYTES."""
    kind, data = ("svg+xml", svg_data) if len(svg_data) <= LARGEST_SVG_BYTES else ("png", png_data)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
