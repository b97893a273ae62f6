"""The figures of `plan`: learning rate and batch over epochs, and a model over ranks."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.core.arrays import shown_bytes
from hvdtrain.extras.figures.figure import GREY, literal, new_figure, run_style, save_png
from hvdtrain.extras.plan.forecast.layers import LayerRange, LayoutRow, ParallelLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class RecipeCurve(NamedTuple):
    """Learning rate and batch at some steps, in order; each value holds until the next."""

    label: str
    epochs: Sequence[float]  # done before each step
    lr: Sequence[float]
    batch: Sequence[int]  # samples over all ranks


def draw_recipe(path: Path, title: str, curves: Sequence[RecipeCurve]) -> str:
    """Writes a PNG; returns a line that reports its path, or that matplotlib is missing. Raises
    UserError like save_png()."""
    return save_png(path, lambda: _recipe_figure(title, curves))


def _recipe_figure(title: str, curves: Sequence[RecipeCurve]) -> Figure:
    figure, (lr_axes, batch_axes) = new_figure(
        2, height=6.4, width=9.6, sharex=True, height_ratios=(2, 1)
    )
    for index, curve in enumerate(curves):
        lr_axes.plot(
            curve.epochs,
            curve.lr,
            label=curve.label,
            drawstyle="steps-post",
            linewidth=1.8,
            **run_style(index),
        )
        batch_axes.plot(
            curve.epochs, curve.batch, drawstyle="steps-post", linewidth=1.8, **run_style(index)
        )
    _scale_lr(lr_axes, [value for curve in curves for value in curve.lr if value > 0])
    _scale_batch(batch_axes, [value for curve in curves for value in curve.batch])
    lr_axes.set_ylabel("learning rate")
    batch_axes.set_ylabel("global batch (samples)")
    batch_axes.set_xlabel("epochs done")
    batch_axes.set_xlim(0, max(curve.epochs[-1] for curve in curves))
    title_lines = [wrapped for line in title.splitlines() for wrapped in textwrap.wrap(line, 120)]
    figure.suptitle("\n".join(title_lines), fontsize=10)
    columns = min(len(curves), 2 if any(len(curve.label) > 36 for curve in curves) else 3)
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _scale_lr(axes: Axes, positive: list[float]) -> None:
    """Uses a logarithmic axis if more than a tenth of the values would be close to 0 on a linear
    one."""
    tenth_percentile = sorted(positive)[len(positive) // 10] if positive else 0.0
    if positive and max(positive) > 200 * tenth_percentile:
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(max(min(positive), tenth_percentile / 30) / 1.5, max(positive) * 1.5)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.06 * max(positive, default=1.0))


def _scale_batch(axes: Axes, batches: list[int]) -> None:
    """Uses powers of two if the largest batch is at least 8 times the smallest; a tick for every
    batch if they are few."""
    if max(batches) >= 8 * min(batches):
        axes.set_yscale("log", base=2)
        axes.set_ylim(min(batches) / 1.5, max(batches) * 1.5)
    else:
        axes.set_ylim(0, 1.15 * max(batches))
    distinct = sorted(set(batches))
    if len(distinct) <= 6:
        axes.set_yticks(distinct if axes.get_yscale() == "log" else [0, *distinct])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()


MOST_RANKS = 8  # columns
MOST_ROWS = 30
_HAS = "#0072B2"
_LACKS = "#EEF1F4"
_STATE = "#E69F00"
_ARROW = "#D55E00"
# inches
_ROW = 0.34
_COLUMN = 1.15
_LABELS = 2.2
_SENT = 3.4
_LONGEST = 58  # characters of the text about sent data
# size of a column and of a row
_BOX = 0.62
_HIGH = 0.74


def draw_layout(path: Path, layout: ParallelLayout, option: str) -> str:
    """Writes a PNG; returns a line for people. Raises UserError as save_png()."""
    return save_png(path, lambda: layout_figure(layout), option)


def layout_figure(layout: ParallelLayout) -> Figure:
    from matplotlib.figure import Figure

    ranks = min(len(layout.ranks), MOST_RANKS)
    rows = layout.rows[:MOST_ROWS]
    left_out = len(layout.rows) - len(rows)
    levels = _levels(rows)
    below = levels[-1] + 1.0
    height = below + 2.0 + 0.6 * bool(layout.gradients or layout.notes) + bool(left_out)
    whole = Figure(figsize=(_LABELS + ranks * _COLUMN + _SENT, _ROW * (height + 2.2)))
    axes = whole.add_axes((0, 0, 1, 1))
    axes.set_xlim(-_LABELS / _COLUMN, ranks + _SENT / _COLUMN)
    axes.set_ylim(height, -2.2)
    axes.axis("off")
    axes.text(
        -_LABELS / _COLUMN + 0.1,
        -1.7,
        literal(layout.title),
        fontsize=10,
        weight="bold",
        va="center",
    )
    for rank in range(ranks):
        axes.text(
            rank + 0.5, -1.0, f"rank {rank}", ha="center", va="center", fontsize=8.5, weight="bold"
        )
        axes.text(
            rank + 0.5,
            -0.45,
            _in_lines(layout.ranks[rank]),
            ha="center",
            va="center",
            fontsize=6.5,
            color=GREY,
        )
    for level, row in zip(levels, rows, strict=True):
        _draw_row(axes, level, row, ranks, layout.together)
    _draw_stages(axes, layout, rows, levels, ranks)
    if left_out:
        _name_row(axes, below, f"... {left_out} more layers")
        below += 1
    _draw_sums(axes, layout, below, ranks)
    return whole


def _levels(rows: list[LayoutRow]) -> list[float]:
    """Returns the height of each row, with room for an arrow between two stages."""
    levels = [0.5]
    for before, row in itertools.pairwise(rows):
        levels.append(levels[-1] + (1.0 if before.stage == row.stage else 1.9))
    return levels


def _draw_row(axes: Axes, level: float, row: LayoutRow, ranks: int, together: list[int]) -> None:
    shape = " x ".join(map(str, row.shape))
    _name_row(axes, level, row.name, f"{shape}, {shown_bytes(row.bytes)}")
    holders = [rank for rank in range(ranks) if row.held[rank] is not None]
    for rank in holders:
        _box(axes, rank, level)
        if held := row.held[rank]:
            _fill_box(axes, rank, level, held, row)
    if row.sent and len(holders) > 1:
        for one, other in itertools.pairwise(holders):
            if together[one] == together[other]:
                _arrow(axes, (one + 0.5 + _BOX / 2, level), (other + 0.5 - _BOX / 2, level), "<->")
    _tell(axes, ranks, level, row.sent)


def _box(axes: Axes, rank: int, level: float, width: float = _BOX, colour: str = _LACKS) -> None:
    from matplotlib.patches import Rectangle

    corner = rank + 0.5 - _BOX / 2, level - _HIGH / 2
    axes.add_patch(
        Rectangle(corner, width, _HIGH, facecolor=colour, edgecolor="#AAB2BA", linewidth=0.6)
    )


def _fill_box(axes: Axes, rank: int, level: float, held: LayerRange, row: LayoutRow) -> None:
    """Fills the rank's part of the weight, in each of its groups."""
    from matplotlib.patches import Rectangle

    left = rank + 0.5 - _BOX / 2
    top = level - _HIGH / 2
    share = (held.stop - held.start) / row.groups
    for group in range(row.groups):
        start = (group + held.start) / row.groups
        if row.way == "columns":
            axes.add_patch(
                Rectangle((left + _BOX * start, top), _BOX * share, _HIGH, facecolor=_HAS)
            )
        else:
            axes.add_patch(
                Rectangle((left, top + _HIGH * start), _BOX, _HIGH * share, facecolor=_HAS)
            )


def _tell(axes: Axes, ranks: int, level: float, text: str) -> None:
    """Writes what is sent, to the right of the ranks."""
    axes.text(
        ranks + 0.1,
        level,
        literal(textwrap.fill(text, _LONGEST)),
        fontsize=7,
        va="center",
        color=_ARROW,
    )


def _draw_stages(
    axes: Axes, layout: ParallelLayout, rows: list[LayoutRow], levels: list[float], ranks: int
) -> None:
    """Draws an arrow from the last layer of a stage to the first layer of the next."""
    for number, (before, row) in enumerate(itertools.pairwise(rows)):
        if before.stage == row.stage:
            continue
        middle = (levels[number] + levels[number + 1]) / 2
        senders = [rank for rank in range(ranks) if before.held[rank] is not None]
        takers = [rank for rank in range(ranks) if row.held[rank] is not None]
        for sender, taker in zip(senders, takers, strict=False):
            side = 0.12 if taker > sender else -0.12
            _arrow(
                axes,
                (sender + 0.5 + side, levels[number] + _HIGH / 2),
                (taker + 0.5 - side, levels[number + 1] - _HIGH / 2),
                "<->",
            )
        _tell(axes, ranks, middle, layout.between_stages)


def _draw_sums(axes: Axes, layout: ParallelLayout, level: float, ranks: int) -> None:
    """Draws below the layers: weights and optimizer state of each rank, and the communication of
    data-parallel ranks."""
    _name_row(axes, level, "weights of a rank")
    _name_row(axes, level + 1, "updates", "whose optimizer state it has")
    whole = sum(row.bytes for row in layout.rows)
    for rank in range(ranks):
        axes.text(
            rank + 0.5,
            level,
            shown_bytes(layout.weight_bytes(rank)),
            ha="center",
            va="center",
            fontsize=8,
        )
        _box(axes, rank, level + 1)
        _box(axes, rank, level + 1, _BOX * layout.updates[rank] / whole, _STATE)
        axes.text(
            rank + 0.5,
            level + 1,
            shown_bytes(layout.updates[rank]),
            ha="center",
            va="center",
            fontsize=7.5,
        )
    if layout.gradients:
        groups = [
            [rank for rank in range(ranks) if _without_data(layout.ranks[rank]) == place]
            for place in _names_of_places(layout, ranks)
        ]
        for depth, group in enumerate(group for group in groups if len(group) > 1):
            at = level + 1.75 + 0.22 * (depth % 4)
            _arrow(axes, (group[0] + 0.5, at), (group[-1] + 0.5, at), "<->")
            axes.plot(
                [rank + 0.5 for rank in group], [at] * len(group), "o", color=_ARROW, markersize=3
            )
        _tell(axes, ranks, level + 1.85, layout.gradients)
    notes = [
        *layout.notes,
        *([f"the first {ranks} of {len(layout.ranks)} ranks"] if len(layout.ranks) > ranks else []),
    ]
    if notes:
        axes.text(
            -_LABELS / _COLUMN + 0.1,
            level + 2.1,
            literal("; ".join(notes)),
            fontsize=7,
            va="center",
            color=GREY,
        )


def _names_of_places(layout: ParallelLayout, ranks: int) -> list[str]:
    return list(dict.fromkeys(_without_data(place) for place in layout.ranks[:ranks]))


def _without_data(place: str) -> str:
    """Returns the place without the data axis; ranks with the same result have the same weights."""
    return ", ".join(part for part in place.split(", ") if not part.startswith("data"))


def _in_lines(place: str) -> str:
    first, _, rest = place.partition(", ")
    return f"{first}\n{rest}" if rest.count(",") else place


def _name_row(axes: Axes, level: float, name: str, detail: str = "") -> None:
    left = -_LABELS / _COLUMN + 0.1
    axes.text(left, level - 0.16 * bool(detail), literal(name), fontsize=8, va="center")
    if detail:
        axes.text(left, level + 0.24, literal(detail), fontsize=6, va="center", color=GREY)


def _arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], style: str) -> None:
    axes.annotate(
        "",
        stop,
        start,
        arrowprops={
            "arrowstyle": style,
            "color": _ARROW,
            "linewidth": 1.1,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )
