"""The efficiency of more and more ranks, measured and predicted, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.report.figures.files import save
from hvdtrain.report.figures.style import look, new

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Line(NamedTuple):
    """Efficiencies, at most 1 of a perfect job, of some numbers of ranks."""

    panel: str  # lines of one name share a plot
    label: str
    ranks: Sequence[int]
    efficiency: Sequence[float]
    measured: bool


def draw(path: Path, title: str, lines: Sequence[Line]) -> str:
    """Writes a PNG, and gives the line that says so, or that says why there is none."""
    return save(path, lambda: _figure(title, lines))


def _figure(title: str, lines: Sequence[Line]) -> Figure:
    panels = list(dict.fromkeys(line.panel for line in lines))
    figure, places = new(1, len(panels), height=4.6, width=4.8 * len(panels), sharey=True)
    for axes, panel in zip(places, panels, strict=True):
        mine = [line for line in lines if line.panel == panel]
        for line in (line for line in mine if line.measured):
            axes.plot(line.ranks, line.efficiency, "o", color="#000000", label=line.label)
        for place, line in enumerate(line for line in mine if not line.measured):
            axes.plot(line.ranks, line.efficiency, linewidth=1.8, label=f"predicted: {line.label}", **look(place))
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.set_title(f"{panel} scaling", fontsize=10)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.axes[0].set_ylabel("efficiency")
    figure.axes[0].set_ylim(0, max(1.05, *(1.05 * value for line in lines for value in line.efficiency)))
    figure.suptitle(title, fontsize=10)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
