"""The picture of a model over ranks: a row for each layer, a column for each rank, and what ranks send each other."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.core.arrays import Layout, LayoutRow, Share, shown_bytes
from hvdtrain.report.figures.canvas import GREY, literal, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 8  # columns
MOST_ROWS = 30
_HAS, _LACKS, _STATE = "#0072B2", "#EEF1F4", "#E69F00"
_ARROW = "#D55E00"
_ROW, _COLUMN, _LABELS, _SENT = 0.34, 1.15, 2.2, 3.4  # inches
_LINE = 58  # letters of what is sent
_BOX, _HIGH = 0.62, 0.74  # of a column and of a row


def draw(path: Path, layout: Layout, option: str) -> str:
    """Writes a PNG; returns a line for people. Raises UserError as save_png()."""
    return save_png(path, lambda: figure(layout), option)


def figure(layout: Layout) -> Figure:
    from matplotlib.figure import Figure

    ranks, rows = min(len(layout.ranks), MOST_RANKS), layout.rows[:MOST_ROWS]
    left_out = len(layout.rows) - len(rows)
    levels = _levels(rows)
    below = levels[-1] + 1.0
    height = below + 2.0 + 0.6 * bool(layout.gradients or layout.notes) + bool(left_out)
    whole = Figure(figsize=(_LABELS + ranks * _COLUMN + _SENT, _ROW * (height + 2.2)))
    axes = whole.add_axes((0, 0, 1, 1))
    axes.set_xlim(-_LABELS / _COLUMN, ranks + _SENT / _COLUMN)
    axes.set_ylim(height, -2.2)
    axes.axis("off")
    axes.text(-_LABELS / _COLUMN + 0.1, -1.7, literal(layout.title), fontsize=10, weight="bold", va="center")
    for rank in range(ranks):
        axes.text(rank + 0.5, -1.0, f"rank {rank}", ha="center", va="center", fontsize=8.5, weight="bold")
        axes.text(rank + 0.5, -0.45, _in_lines(layout.ranks[rank]), ha="center", va="center", fontsize=6.5, color=GREY)
    for level, row in zip(levels, rows, strict=True):
        _draw_row(axes, level, row, ranks, layout.together)
    _draw_stages(axes, layout, rows, levels, ranks)
    if left_out:
        _label(axes, below, f"... {left_out} more layers")
        below += 1
    _draw_sums(axes, layout, below, ranks)
    return whole


def _levels(rows: list[LayoutRow]) -> list[float]:
    """Where each row is, with room for an arrow between two stages."""
    found = [0.5]
    for before, row in itertools.pairwise(rows):
        found.append(found[-1] + (1.0 if before.stage == row.stage else 1.9))
    return found


def _draw_row(axes: Axes, level: float, row: LayoutRow, ranks: int, together: list[int]) -> None:
    shape = " x ".join(map(str, row.shape))
    _label(axes, level, row.name, f"{shape}, {shown_bytes(row.bytes)}")
    holders = [rank for rank in range(ranks) if row.held[rank] is not None]
    for rank in holders:
        _box(axes, rank, level)
        if held := row.held[rank]:
            _fill(axes, rank, level, held, row)
    if row.sent and len(holders) > 1:
        for one, other in itertools.pairwise(holders):
            if together[one] == together[other]:
                _arrow(axes, (one + 0.5 + _BOX / 2, level), (other + 0.5 - _BOX / 2, level), "<->")
    _tell(axes, ranks, level, row.sent)


def _box(axes: Axes, rank: int, level: float, width: float = _BOX, colour: str = _LACKS) -> None:
    from matplotlib.patches import Rectangle

    corner = rank + 0.5 - _BOX / 2, level - _HIGH / 2
    axes.add_patch(Rectangle(corner, width, _HIGH, facecolor=colour, edgecolor="#AAB2BA", linewidth=0.6))


def _fill(axes: Axes, rank: int, level: float, held: Share, row: LayoutRow) -> None:
    """The rank's part of the weight, in each of its groups."""
    from matplotlib.patches import Rectangle

    left, top, share = rank + 0.5 - _BOX / 2, level - _HIGH / 2, (held.stop - held.start) / row.groups
    for group in range(row.groups):
        start = (group + held.start) / row.groups
        if row.way == "columns":
            axes.add_patch(Rectangle((left + _BOX * start, top), _BOX * share, _HIGH, facecolor=_HAS))
        else:
            axes.add_patch(Rectangle((left, top + _HIGH * start), _BOX, _HIGH * share, facecolor=_HAS))


def _tell(axes: Axes, ranks: int, level: float, text: str) -> None:
    """What is sent, to the right of the ranks."""
    axes.text(ranks + 0.1, level, literal(textwrap.fill(text, _LINE)), fontsize=7, va="center", color=_ARROW)


def _draw_stages(axes: Axes, layout: Layout, rows: list[LayoutRow], levels: list[float], ranks: int) -> None:
    """An arrow from the last layer of a stage to the first one of the next."""
    for number, (before, row) in enumerate(itertools.pairwise(rows)):
        if before.stage == row.stage:
            continue
        middle = (levels[number] + levels[number + 1]) / 2
        senders = [rank for rank in range(ranks) if before.held[rank] is not None]
        takers = [rank for rank in range(ranks) if row.held[rank] is not None]
        for sender, taker in zip(senders, takers, strict=False):
            side = 0.12 if taker > sender else -0.12
            _arrow(axes, (sender + 0.5 + side, levels[number] + _HIGH / 2), (taker + 0.5 - side, levels[number + 1] - _HIGH / 2), "<->")
        _tell(axes, ranks, middle, layout.between_stages)


def _draw_sums(axes: Axes, layout: Layout, level: float, ranks: int) -> None:
    """Below the layers: weights and optimizer state of each rank, and what goes over the ranks of data."""
    _label(axes, level, "weights of a rank")
    _label(axes, level + 1, "updates", "whose optimizer state it has")
    whole = sum(row.bytes for row in layout.rows)
    for rank in range(ranks):
        axes.text(rank + 0.5, level, shown_bytes(layout.weight_bytes(rank)), ha="center", va="center", fontsize=8)
        _box(axes, rank, level + 1)
        _box(axes, rank, level + 1, _BOX * layout.updates[rank] / whole, _STATE)
        axes.text(rank + 0.5, level + 1, shown_bytes(layout.updates[rank]), ha="center", va="center", fontsize=7.5)
    if layout.gradients:
        groups = [[rank for rank in range(ranks) if _without_data(layout.ranks[rank]) == place] for place in _places(layout, ranks)]
        for depth, group in enumerate(group for group in groups if len(group) > 1):
            at = level + 1.75 + 0.22 * (depth % 4)
            _arrow(axes, (group[0] + 0.5, at), (group[-1] + 0.5, at), "<->")
            axes.plot([rank + 0.5 for rank in group], [at] * len(group), "o", color=_ARROW, markersize=3)
        _tell(axes, ranks, level + 1.85, layout.gradients)
    notes = [*layout.notes, *([f"the first {ranks} of {len(layout.ranks)} ranks"] if len(layout.ranks) > ranks else [])]
    if notes:
        axes.text(-_LABELS / _COLUMN + 0.1, level + 2.1, literal("; ".join(notes)), fontsize=7, va="center", color=GREY)


def _places(layout: Layout, ranks: int) -> list[str]:
    return list(dict.fromkeys(_without_data(place) for place in layout.ranks[:ranks]))


def _without_data(place: str) -> str:
    """The ranks of one such place have the same weights."""
    return ", ".join(part for part in place.split(", ") if not part.startswith("data"))


def _in_lines(place: str) -> str:
    first, _, rest = place.partition(", ")
    return f"{first}\n{rest}" if rest.count(",") else place


def _label(axes: Axes, level: float, name: str, detail: str = "") -> None:
    left = -_LABELS / _COLUMN + 0.1
    axes.text(left, level - 0.16 * bool(detail), literal(name), fontsize=8, va="center")
    if detail:
        axes.text(left, level + 0.24, literal(detail), fontsize=6, va="center", color=GREY)


def _arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], style: str) -> None:
    axes.annotate("", stop, start, arrowprops={"arrowstyle": style, "color": _ARROW, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0})
