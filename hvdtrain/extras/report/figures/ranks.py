"""The figures of ranks: their own work in a step, scaling over ranks, and the activity of ranks
that share one model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.extras.figures.figure import (
    COLOURS,
    GREY,
    HEIGHT,
    LineStyle,
    integer_ticks,
    literal,
    new_figure,
    run_style,
)
from hvdtrain.extras.report.figures.canvas import LegendEntry, legend, row_names
from hvdtrain.extras.report.figures.speed import PHASES
from hvdtrain.extras.report.measures.compare import ScalingComparison, Spread, scaling_comparisons
from hvdtrain.extras.report.measures.mesh import MOST_RANKS, bubble, mesh_of, predicted_bubble
from hvdtrain.extras.report.measures.summary import (
    Straggler,
    finite,
    host_of,
    rank_work_ms,
    straggler,
)
from hvdtrain.records.run import Fields, RunRecord, number, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# up to this many ranks points are drawn, above it a heat map
_FEW_RANKS = 8
_FEW_EPOCHS = 4
_BLACK = "#000000"
_RING: LineStyle = {
    "marker": "o",
    "linestyle": "none",
    "markerfacecolor": "none",
    "color": COLOURS[1],
    "markersize": 8,
}
_IDEAL: LineStyle = {"color": GREY, "linewidth": 1.0, "linestyle": (0, (4, 3))}
_MOST_BARS = 48  # ranks
_WAITING = "#E4E4E4"
_MOST_NUMBERS = 40  # passes of a rank up to which micro-batches are numbered


class _RunWithStraggler(NamedTuple):
    label: str
    run: RunRecord
    slowest: Straggler


def own_work(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws each rank's own work in a step in milliseconds, without communication; a rank that
    delays the others is named."""
    measured = [
        _RunWithStraggler(label, run, found)
        for label, run in zip(labels, runs, strict=True)
        if (found := straggler(run))
    ]
    if not measured:
        return None
    if len(runs) > 1:
        return _work_of_runs(measured)
    run = measured[0].run
    slowest = measured[0].slowest
    ranks = len(rank_work_ms(run))
    epochs = [
        row for event in run.epoch_events() if len(row := numbers(event, "rank_work_ms")) == ranks
    ]
    return (
        _work_points(epochs, slowest)
        if ranks <= _FEW_RANKS or len(epochs) <= _FEW_EPOCHS
        else _work_map(epochs, slowest)
    )


def _work_points(epochs: list[list[float]], slowest: Straggler) -> Figure:
    """Draws a column of points for each rank, one for each evaluation, and their mean. `epochs`:
    milliseconds by evaluation and rank."""
    figure, (axes,) = new_figure()
    for row in epochs:
        axes.plot(
            range(len(row)),
            row,
            "o",
            color=COLOURS[0],
            markersize=3.5,
            alpha=0.35,
            markeredgewidth=0,
        )
    known = [finite(rank) for rank in zip(*epochs, strict=True)]
    means = [sum(values) / len(values) if values else math.nan for values in known]
    axes.plot(
        range(len(means)),
        means,
        "_",
        color=_BLACK,
        markersize=12 if len(means) <= 24 else 4,
        markeredgewidth=1.6,
    )
    axes.set_xlabel("rank")
    axes.set_ylabel("own work in a step (ms)")
    axes.set_xlim(-0.7, len(means) - 0.3)
    axes.set_ylim(0, 1.25 * max(value for row in epochs for value in finite(row)))
    integer_ticks(axes.xaxis)
    point: LineStyle = {"marker": "o", "linestyle": "none", "color": COLOURS[0], "markersize": 4}
    entries: list[LegendEntry] = [
        ("an evaluation", point),
        ("mean", {"color": _BLACK, "linewidth": 1.6}),
    ]
    if slowest.is_slow:
        highest = max(known[slowest.rank])
        _mark_slowest(axes, slowest.rank, slowest.work_ms, slowest, above=highest)
        entries.append(("slowest", _RING))
    legend(figure, entries)
    return figure


def _mark_slowest(axes: Axes, x: float, y: float, slowest: Straggler, above: float) -> None:
    """A ring around the point of the slowest rank, with its number and host on the side that has
    more room. above: the highest of the points that its name must not cover."""
    axes.plot(x, y, **_RING)
    name = literal(f"rank {slowest.rank}" + (f" on {slowest.host:.20}" if slowest.host else ""))
    in_right_half = x > sum(axes.get_xlim()) / 2
    offset = (4 if in_right_half else -4, 8)
    position: dict[str, Any] = {
        "textcoords": "offset points",
        "ha": "right" if in_right_half else "left",
        "va": "bottom",
    }
    axes.annotate(name, (x, above), offset, color=COLOURS[1], fontsize=8.5, **position)


def _work_map(epochs: list[list[float]], slowest: Straggler) -> Figure:
    """Draws a heat map of ranks by evaluations; matplotlib drops rows if there are more ranks than
    pixels."""
    figure, (axes,) = new_figure()
    axes.grid(visible=False)
    ranks = [list(rank) for rank in zip(*epochs, strict=True)]
    extent = (0.5, len(epochs) + 0.5, len(ranks) - 0.5, -0.5)
    image = axes.imshow(
        ranks, aspect="auto", cmap="cividis", interpolation="nearest", extent=extent
    )
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("own work in a step (ms)")
    bar.outline.set_visible(False)
    axes.set_xlabel("evaluation")
    axes.set_ylabel("rank")
    if slowest.is_slow:
        name = f"rank {slowest.rank}" + (f" on {slowest.host:.30}" if slowest.host else "")
        axes.set_title(
            literal(f"slowest: {name}, {slowest.work_ms:.3g} ms"), fontsize=9, color=COLOURS[1]
        )
    integer_ticks(axes.xaxis, axes.yaxis)
    return figure


def _work_of_runs(measured: Sequence[_RunWithStraggler]) -> Figure:
    """Draws a row of points for each run, one for each rank."""
    names = row_names([one.label for one in measured])
    figure, (axes,) = new_figure(height=1.5 + names.height * len(measured))
    for row, one in enumerate(measured):
        work_ms = rank_work_ms(one.run)
        axes.plot(
            work_ms,
            [row] * len(work_ms),
            "o",
            color=COLOURS[0],
            markersize=4,
            alpha=0.6,
            markeredgewidth=0,
        )
    axes.set_xlim(0, 1.15 * max(one.slowest.work_ms for one in measured))
    axes.set_yticks(range(len(measured)), names.texts, fontsize=8)
    axes.set_ylim(len(measured) - 0.4, -0.7)
    axes.set_xlabel("own work in a step (ms)")
    for row, one in enumerate(measured):
        if one.slowest.is_slow:
            _mark_slowest(axes, one.slowest.work_ms, row, one.slowest, above=row)
    return figure


def scaling(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws speed-up, efficiency, and energy if it was measured, of each comparison relative to its
    fewest ranks."""
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
        _draw_comparison(
            panels,
            comparison,
            run_style(index) | {"linewidth": 1.6, "marker": "o", "markersize": 4, "capsize": 3},
        )
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


def _draw_comparison(
    panels: Sequence[Axes], comparison: ScalingComparison, style: LineStyle
) -> None:
    """Draws the comparison, with error bars of the deviation over seeds if there are several."""
    base = comparison.rows[0]
    rows = comparison.rows
    x = [row.ranks / base.ranks for row in rows]
    speed_errors = [_relative_sd(row.samples_per_s, base.samples_per_s) for row in rows]
    efficiency_errors = [error / times for error, times in zip(speed_errors, x, strict=True)]
    panels[0].errorbar(x, [row.speed_up for row in rows], speed_errors, **style)
    panels[1].errorbar(x, [row.efficiency for row in rows], efficiency_errors, **style)
    if len(panels) > 2:
        energy_errors = [
            _relative_sd(row.joules_per_sample, base.joules_per_sample) for row in rows
        ]
        panels[2].errorbar(x, [row.energy_ratio for row in rows], energy_errors, **style)


def _relative_sd(spread: Spread, base: Spread) -> float:
    """Returns the standard deviation in units of the base's mean; 0 for a single run."""
    return spread.sd / base.mean if math.isfinite(spread.sd) and base.mean else 0.0


_PARTS = {
    "computing": PHASES["forward"],
    "waiting for stages": "#CCCCCC",
    "communication": PHASES["communication"],
}
_KINDS = {
    "forward": PHASES["forward"],
    "backward": PHASES["backward"],
    "input gradient": "#56B4E9",
    "weight gradient": PHASES["update"],
}
_MOST_RANKS = 64
_MOST_PASSES = 8192


class _Pass(NamedTuple):
    kind: str
    micro: float
    wait_ms: float  # when its rank begins to wait for the pass's input
    start_ms: float
    stop_ms: float


def time_of_ranks(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws a bar for each rank of a single run, in the order of the mesh: own work, waiting for
    other stages, other communication."""
    if len(runs) > 1:
        return None
    work, communication, waiting = (
        _of_ranks(runs[0], f"rank_{name}_ms") for name in ("work", "communication", "waiting")
    )
    if not work or len(work) != len(communication):
        return None
    mesh = mesh_of(runs[0])
    mesh = mesh if mesh and len(mesh.places) == len(work) else None
    waiting = waiting if len(waiting) == len(work) else [0.0] * len(work)
    order = sorted(range(len(work)), key=lambda rank: mesh.places[rank] if mesh else (rank,))[
        :_MOST_BARS
    ]
    figure, (axes,) = new_figure(height=1.2 + 0.24 * len(order))
    lengths = [
        work,
        waiting,
        [max(0.0, all_ms - waited) for all_ms, waited in zip(communication, waiting, strict=True)],
    ]
    left = [0.0] * len(order)
    entries = []
    for (name, colour), of_ranks in zip(_PARTS.items(), lengths, strict=True):
        part = [of_ranks[rank] if math.isfinite(of_ranks[rank]) else 0.0 for rank in order]
        if any(part):
            axes.barh(range(len(order)), part, 0.8, left=left, color=colour)
            entries.append((name, {"color": colour, "linewidth": 6}))
        left = [start + length for start, length in zip(left, part, strict=True)]
    names = [_name(runs[0], rank, f" ({mesh.name(rank)})" if mesh else "") for rank in order]
    axes.set_yticks(range(len(order)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(
        "ms of one step"
        + (f", the first {_MOST_BARS} of {len(work):,} ranks" if len(work) > _MOST_BARS else "")
    )
    legend(figure, entries)
    return figure


def timeline(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws the passes of the last step before the last evaluation of a single run: a row for each
    rank of one pipeline; gaps are waiting."""
    event = next(reversed(runs[0].events_of("passes")), {}) if len(runs) == 1 else {}
    rows = _passes(event)
    ranks = _ranks(event)
    if not rows or len(ranks) != len(rows):
        return None
    figure, (axes,) = new_figure(height=1.3 + 0.36 * len(rows))
    for row, passes in enumerate(rows):
        axes.broken_barh(
            [(one.wait_ms, one.start_ms - one.wait_ms) for one in passes],
            (row - 0.12, 0.24),
            color=_WAITING,
        )
        for kind, colour in _KINDS.items():
            spans = [
                (one.start_ms, one.stop_ms - one.start_ms) for one in passes if one.kind == kind
            ]
            if spans:
                axes.broken_barh(
                    spans, (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.4
                )
        if len(passes) <= _MOST_NUMBERS:
            _number_passes(
                axes, row, passes, max(one.stop_ms for of_rank in rows for one in of_rank)
            )
    mesh = mesh_of(runs[0])
    places = [
        f" (stage {mesh.places[rank].stage})" if mesh and rank < len(mesh.places) else ""
        for rank in ranks
    ]
    axes.set_yticks(
        range(len(rows)),
        [_name(runs[0], rank, place) for rank, place in zip(ranks, places, strict=True)],
        fontsize=8,
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(visible=False)
    axes.set_xlabel("ms")
    axes.set_title(f"step {number(event, 'step'):.0f}{_bubble(runs[0])}", fontsize=9)
    used = {one.kind for passes in rows for one in passes}
    names = [
        (name, {"color": colour, "linewidth": 6}) for name, colour in _KINDS.items() if name in used
    ]
    legend(figure, [*names, ("waits", {"color": _WAITING, "linewidth": 4})])
    return figure


def _number_passes(axes: Any, row: int, passes: Sequence[_Pass], whole_ms: float) -> None:
    """Writes the number of the micro-batch into each pass that has room for it."""
    for one in passes:
        if one.stop_ms - one.start_ms > 0.02 * whole_ms:
            middle = (one.start_ms + one.stop_ms) / 2
            axes.text(
                middle, row, f"{one.micro:.0f}", ha="center", va="center", fontsize=7, color="white"
            )


def _bubble(run: RunRecord) -> str:
    waiting = finite(bubble(run))
    predicted = predicted_bubble(run)
    if not waiting:
        return ""
    by_schedule = (
        f", {predicted:.0%} by the schedule with equal stages" if math.isfinite(predicted) else ""
    )
    return f"; bubble of the job {sum(waiting) / len(waiting):.0%}{by_schedule}"


def _name(run: RunRecord, rank: int, place: str) -> str:
    host = host_of(run.start_event, rank)
    return literal(f"{rank}{f' on {host:.16}' if host else ''}{place}")


def _of_ranks(run: RunRecord, field: str) -> list[float]:
    """Returns a field's value for each rank, the mean over evaluations on the last number of
    ranks."""
    rows = [row for event in run.epoch_events() if (row := numbers(event, field))]
    rows = [row for row in rows if len(row) == len(rows[-1])]
    known = [finite(rank) for rank in zip(*rows, strict=True)]
    return [sum(values) / len(values) if values else math.nan for values in known]


def _passes(event: Fields) -> list[list[_Pass]]:
    """Returns the passes of each rank; empty if the event belongs to another job."""
    rows = event.get("passes")
    if not isinstance(rows, list) or len(rows) > _MOST_RANKS:
        return []
    found = []
    for row in rows:
        if (
            not isinstance(row, list)
            or len(row) > _MOST_PASSES
            or not all(isinstance(one, list) and len(one) == 6 for one in row)
        ):
            return []
        of_rank = [
            _Pass(str(one[0]), *numbers({"pass": [one[2], *one[3:]]}, "pass")) for one in row
        ]
        found.append(
            [
                one
                for one in of_rank
                if one.kind in _KINDS and all(math.isfinite(value) for value in one[1:])
            ]
        )
    return found if any(found) else []


def _ranks(event: Fields) -> list[int]:
    """Returns the ranks that the passes belong to; empty if one of them is not a rank."""
    found = numbers(event, "passes_of_ranks")
    return (
        [int(rank) for rank in found]
        if all(0 <= rank < MOST_RANKS and rank.is_integer() for rank in found)
        else []
    )
