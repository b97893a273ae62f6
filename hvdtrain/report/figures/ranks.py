"""The figures of ranks: each rank's own work in a step, and scaling over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.report.compare import ScalingComparison, Spread, scaling_comparisons
from hvdtrain.report.figures.style import COLOURS, GREY, HEIGHT, LineStyle, integer_ticks, legend, literal, new_figure, run_style
from hvdtrain.report.run import RunRecord, numbers
from hvdtrain.report.summary import Straggler, finite, rank_work_ms, straggler

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW_RANKS, _FEW_EPOCHS = 8, 4  # up to these points; above a heat map
_BLACK = "#000000"
_RING: LineStyle = {"marker": "o", "linestyle": "none", "markerfacecolor": "none", "color": COLOURS[1], "markersize": 8}
_IDEAL: LineStyle = {"color": GREY, "linewidth": 1.0, "linestyle": (0, (4, 3))}


class _RunWithStraggler(NamedTuple):
    label: str
    run: RunRecord
    slowest: Straggler


def own_work(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Milliseconds of each rank's own work in a step, without communication; the slowest rank is named."""
    measured = [_RunWithStraggler(label, run, found) for label, run in zip(labels, runs, strict=True) if (found := straggler(run))]
    if not measured:
        return None
    if len(runs) > 1:
        return _work_of_runs(measured)
    run, slowest = measured[0].run, measured[0].slowest
    ranks = len(rank_work_ms(run))
    epochs = [row for event in run.epoch_events() if len(row := numbers(event, "rank_work_ms")) == ranks]
    return _work_points(epochs, slowest) if ranks <= _FEW_RANKS or len(epochs) <= _FEW_EPOCHS else _work_map(epochs, slowest)


def _work_points(epochs: list[list[float]], slowest: Straggler) -> Figure:
    """A column of points for each rank, one for each evaluation, and their mean. `epochs`: milliseconds by evaluation and rank."""
    figure, (axes,) = new_figure()
    for row in epochs:
        axes.plot(range(len(row)), row, "o", color=COLOURS[0], markersize=3.5, alpha=0.35, markeredgewidth=0)
    known = [finite(rank) for rank in zip(*epochs, strict=True)]
    means = [sum(values) / len(values) if values else math.nan for values in known]
    axes.plot(range(len(means)), means, "_", color=_BLACK, markersize=12 if len(means) <= 24 else 4, markeredgewidth=1.6)
    _mark_slowest(axes, slowest.rank, slowest.work_ms, slowest)
    axes.set_xlabel("rank")
    axes.set_ylabel("own work in a step (ms)")
    axes.set_xlim(-0.7, len(means) - 0.3)
    axes.set_ylim(0, 1.25 * max(value for row in epochs for value in finite(row)))
    integer_ticks(axes.xaxis)
    point: LineStyle = {"marker": "o", "linestyle": "none", "color": COLOURS[0], "markersize": 4}
    legend(figure, [("an evaluation", point), ("mean", {"color": _BLACK, "linewidth": 1.6}), ("slowest", _RING)])
    return figure


def _mark_slowest(axes: Axes, x: float, y: float, slowest: Straggler) -> None:
    """A ring around the point of the slowest rank, with its number and host on the side that has more room."""
    axes.plot(x, y, **_RING)
    name = literal(f"rank {slowest.rank}" + (f" on {slowest.host:.20}" if slowest.host else ""))
    in_right_half = x > sum(axes.get_xlim()) / 2
    offset = (4 if in_right_half else -4, 7)
    position: dict[str, Any] = {"textcoords": "offset points", "ha": "right" if in_right_half else "left", "va": "bottom"}
    axes.annotate(name, (x, y), offset, color=COLOURS[1], fontsize=8.5, **position)


def _work_map(epochs: list[list[float]], slowest: Straggler) -> Figure:
    """A heat map of ranks by evaluations; matplotlib drops pixels where there are more ranks than pixels."""
    figure, (axes,) = new_figure()
    axes.grid(visible=False)
    ranks = [list(rank) for rank in zip(*epochs, strict=True)]
    extent = (0.5, len(epochs) + 0.5, len(ranks) - 0.5, -0.5)
    image = axes.imshow(ranks, aspect="auto", cmap="cividis", interpolation="nearest", extent=extent)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("own work in a step (ms)")
    bar.outline.set_visible(False)
    axes.set_xlabel("evaluation")
    axes.set_ylabel("rank")
    name = f"rank {slowest.rank}" + (f" on {slowest.host:.30}" if slowest.host else "")
    axes.set_title(literal(f"slowest: {name}, {slowest.work_ms:.3g} ms"), fontsize=9, color=COLOURS[1])
    integer_ticks(axes.xaxis, axes.yaxis)
    return figure


def _work_of_runs(measured: Sequence[_RunWithStraggler]) -> Figure:
    """A row of points for each run, one for each rank."""
    figure, (axes,) = new_figure(height=1.5 + 0.34 * len(measured))
    for row, one in enumerate(measured):
        work_ms = rank_work_ms(one.run)
        axes.plot(work_ms, [row] * len(work_ms), "o", color=COLOURS[0], markersize=4, alpha=0.6, markeredgewidth=0)
        _mark_slowest(axes, one.slowest.work_ms, row, one.slowest)
    axes.set_yticks(range(len(measured)), [literal(one.label) for one in measured], fontsize=8.5)
    axes.set_ylim(len(measured) - 0.4, -0.7)
    axes.set_xlim(0, 1.15 * max(one.slowest.work_ms for one in measured))
    axes.set_xlabel("own work in a step (ms), a point for each rank")
    return figure


def scaling(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Speed-up, efficiency, and energy where it was measured, of each comparison relative to its fewest ranks."""
    comparisons = scaling_comparisons(runs)
    if not comparisons or not finite(row.speed_up for one in comparisons for row in one.rows[1:]):
        return None
    titles = ["speed-up", "efficiency"]
    if finite(row.energy_ratio for one in comparisons for row in one.rows[1:]):
        titles.append("energy ratio")
    figure, panels = new_figure(1, len(titles), height=HEIGHT - 0.4)
    most = max(row.ranks / one.rows[0].ranks for one in comparisons for row in one.rows)
    panels[0].plot([1, most], [1, most], **_IDEAL)
    panels[1].axhline(1.0, **_IDEAL)
    for index, comparison in enumerate(comparisons):
        _draw_comparison(panels, comparison, run_style(index) | {"linewidth": 1.6, "marker": "o", "markersize": 4, "capsize": 3})
    from_one_rank = all(one.rows[0].ranks == 1 for one in comparisons)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=9.5)
        axes.set_xlabel("ranks" if from_one_rank else "ranks / fewest", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    panels[1].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    entries = [(f"batch {one.batch}", run_style(index)) for index, one in enumerate(comparisons)]
    legend(figure, [*entries, ("ideal", {"color": GREY, "linestyle": "--"})])
    return figure


def _draw_comparison(panels: Sequence[Axes], comparison: ScalingComparison, style: LineStyle) -> None:
    """With error bars of the deviation over seeds, where there are several."""
    base, rows = comparison.rows[0], comparison.rows
    x = [row.ranks / base.ranks for row in rows]
    speed_errors = [_relative_sd(row.samples_per_s, base.samples_per_s) for row in rows]
    efficiency_errors = [error / times for error, times in zip(speed_errors, x, strict=True)]
    panels[0].errorbar(x, [row.speed_up for row in rows], speed_errors, **style)
    panels[1].errorbar(x, [row.efficiency for row in rows], efficiency_errors, **style)
    if len(panels) > 2:
        energy_errors = [_relative_sd(row.joules_per_sample, base.joules_per_sample) for row in rows]
        panels[2].errorbar(x, [row.energy_ratio for row in rows], energy_errors, **style)


def _relative_sd(spread: Spread, base: Spread) -> float:
    """The standard deviation in units of the base's mean; 0 for a single run."""
    return spread.sd / base.mean if math.isfinite(spread.sd) and base.mean else 0.0
