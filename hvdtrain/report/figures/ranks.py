"""The figures of ranks: each one's own work in a step, and what more of them bring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.report.compare import Comparison, Spread, comparisons
from hvdtrain.report.figures.style import COLOURS, GREY, HEIGHT, legend, look, new, plain, whole
from hvdtrain.report.run import Record, numbers
from hvdtrain.report.summary import Straggler, finite, rank_work_ms, straggler

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW_RANKS, _FEW_EPOCHS = 8, 4  # up to these a map would have too few fields


def own_work(records: Sequence[Record], labels: Sequence[str]) -> Figure | None:
    """Milliseconds of a rank's own work in a step, without communication; the slowest rank is named."""
    told = [(label, record, found) for label, record in zip(labels, records, strict=True) if (found := straggler(record))]
    if not told:
        return None
    if len(records) > 1:
        return _of_runs(told)
    record, slowest = told[0][1:]
    rows = [numbers(event, "rank_work_ms") for event in record.epochs()]
    rows = [row for row in rows if len(row) == len(rank_work_ms(record))]
    return _points(rows, slowest) if len(rows[0]) <= _FEW_RANKS or len(rows) <= _FEW_EPOCHS else _map(rows, slowest)


def _points(rows: list[list[float]], slowest: Straggler) -> Figure:
    """A column of points for each rank, one for each epoch, and their mean."""
    figure, (axes,) = new()
    for row in rows:
        axes.plot(range(len(row)), row, "o", color=COLOURS[0], markersize=3.5, alpha=0.35, markeredgewidth=0)
    means = [sum(known) / len(known) if (known := finite(column)) else math.nan for column in zip(*rows, strict=True)]
    axes.plot(range(len(means)), means, "_", color="#000000", markersize=12 if len(means) <= 24 else 4, markeredgewidth=1.6)
    _name(axes, (slowest.rank, slowest.ms), slowest)
    axes.set_xlabel("rank")
    axes.set_ylabel("own work in a step (ms)")
    axes.set_xlim(-0.7, len(means) - 0.3)
    axes.set_ylim(0, 1.25 * max(value for row in rows for value in finite(row)))
    whole(axes.xaxis)
    point: dict[str, Any] = {"marker": "o", "linestyle": "none", "color": COLOURS[0], "markersize": 4}
    legend(figure, [("an epoch", point), ("mean", {"color": "#000000", "linewidth": 1.6}), ("slowest", _RING)])
    return figure


_RING: dict[str, Any] = {"marker": "o", "linestyle": "none", "markerfacecolor": "none", "color": COLOURS[1], "markersize": 8}


def _name(axes: Axes, at: tuple[float, float], slowest: Straggler) -> None:
    axes.plot(*at, **_RING)
    words = plain(f"rank {slowest.rank}" + (f" on {slowest.host:.20}" if slowest.host else ""))
    left = at[0] > sum(axes.get_xlim()) / 2
    spot: dict[str, Any] = {"textcoords": "offset points", "ha": "right" if left else "left", "va": "bottom", "fontsize": 8.5}
    axes.annotate(words, at, (4 if left else -4, 7), color=COLOURS[1], **spot)


def _map(rows: list[list[float]], slowest: Straggler) -> Figure:
    """Ranks by epochs; matplotlib leaves out pixels where there are more ranks than those."""
    figure, (axes,) = new()
    axes.grid(visible=False)
    values = [list(column) for column in zip(*rows, strict=True)]
    ends = (0.5, len(rows) + 0.5, len(values) - 0.5, -0.5)
    image = axes.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest", extent=ends)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("own work in a step (ms)")
    bar.outline.set_visible(False)
    axes.set_xlabel("epoch")
    axes.set_ylabel("rank")
    words = f"rank {slowest.rank}" + (f" on {slowest.host:.30}" if slowest.host else "")
    axes.set_title(plain(f"slowest: {words}, {slowest.ms:.3g} ms"), fontsize=9, color=COLOURS[1])
    whole(axes.xaxis, axes.yaxis)
    return figure


def _of_runs(told: Sequence[tuple[str, Record, Straggler]]) -> Figure:
    """A row of points for each run, one for each rank."""
    figure, (axes,) = new(height=1.5 + 0.34 * len(told))
    for row, (_, record, slowest) in enumerate(told):
        work = rank_work_ms(record)
        axes.plot(work, [row] * len(work), "o", color=COLOURS[0], markersize=4, alpha=0.6, markeredgewidth=0)
        _name(axes, (slowest.ms, row), slowest)
    axes.set_yticks(range(len(told)), [plain(label) for label, *_ in told], fontsize=8.5)
    axes.set_ylim(len(told) - 0.4, -0.7)
    axes.set_xlim(0, 1.15 * max(slowest.ms for *_, slowest in told))
    axes.set_xlabel("own work in a step (ms), a point for each rank")
    return figure


def scaling(records: Sequence[Record], labels: Sequence[str]) -> Figure | None:
    """Speed-up, efficiency, and energy where it was measured, against the fewest ranks of each comparison."""
    found = comparisons(records)
    if not found or not finite(row.speed_up for one in found for row in one.rows[1:]):
        return None
    energy = any(finite(row.energy_ratio for one in found for row in one.rows[1:]))
    figure, places = new(1, 2 + energy, height=HEIGHT - 0.4)
    most = max(row.ranks / one.rows[0].ranks for one in found for row in one.rows)
    places[0].plot([1, most], [1, most], color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    places[1].axhline(1.0, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    for place, one in enumerate(found):
        _draw(places, one, look(place) | {"linewidth": 1.6, "marker": "o", "markersize": 4, "capsize": 3})
    from_one = all(one.rows[0].ranks == 1 for one in found)
    for axes, title in zip(places, ("speed-up", "efficiency", "energy ratio"), strict=False):
        axes.set_title(title, fontsize=9.5)
        axes.set_xlabel("ranks" if from_one else "ranks / fewest", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    places[1].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    legend(
        figure, [(f"batch {one.batch}", look(place)) for place, one in enumerate(found)] + [("ideal", {"color": GREY, "linestyle": "--"})]
    )
    return figure


def _draw(places: Sequence[Axes], one: Comparison, kind: dict[str, Any]) -> None:
    """With the deviation over seeds where there are several."""
    base = one.rows[0]
    x = [row.ranks / base.ranks for row in one.rows]
    speed = [_relative(row.images_per_s, base.images_per_s) for row in one.rows]
    places[0].errorbar(x, [row.speed_up for row in one.rows], speed, **kind)
    places[1].errorbar(x, [row.efficiency for row in one.rows], [error / times for error, times in zip(speed, x, strict=True)], **kind)
    if len(places) > 2:
        joules = [_relative(row.joules_per_image, base.joules_per_image) for row in one.rows]
        places[2].errorbar(x, [row.energy_ratio for row in one.rows], joules, **kind)


def _relative(spread: Spread, base: Spread) -> float:
    """The deviation in units of the mean of the fewest ranks; 0 where there is one run only."""
    return spread.sd / base.mean if math.isfinite(spread.sd) and base.mean else 0.0
