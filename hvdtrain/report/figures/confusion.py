"""The figure of the last evaluation: what the model takes each class for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdtrain.report import evaluations
from hvdtrain.report.figures.style import HEIGHT, integer_ticks, literal, new_figure
from hvdtrain.report.run import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NAMES = 30  # classes whose names are written on the axes
_MOST_NUMBERS = 12  # classes whose shares are written into the cells
_DARK = 0.5  # shares from here on are written in white


def matrix(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Shares of each class's samples by what the model says, of one run; None for several runs, and without a confusion matrix."""
    last = next(reversed(evaluations.of_run(runs[0])), None) if len(runs) == 1 else None
    shares = evaluations.confusion(last) if last else None
    if last is None or shares is None:
        return None
    classes = len(shares)
    figure, (axes,) = new_figure(height=HEIGHT + 1.2)
    axes.grid(visible=False)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    bar = figure.colorbar(image, ax=axes)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if classes <= _MOST_NAMES:
        names = [literal(name) for name in evaluations.class_names(last, classes)]
        axes.set_xticks(range(classes), names, rotation=90, fontsize=8)
        axes.set_yticks(range(classes), names, fontsize=8)
    else:
        integer_ticks(axes.xaxis, axes.yaxis)
    if classes <= _MOST_NUMBERS:
        for row, values in enumerate(shares):
            for column, share in enumerate(values):
                if share >= 0.005:
                    colour = "white" if share >= _DARK else "black"
                    axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xlabel("what the model says")
    axes.set_ylabel("class")
    axes.set_title(literal(evaluations.data_of(last)[:80]), fontsize=9)
    return figure
