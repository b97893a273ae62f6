"""The figure of bench scaling: efficiency over ranks, measured and predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.extras.figures.figure import new_figure, run_style, save_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class EfficiencyLine(NamedTuple):
    """Efficiencies (1: ideal) by number of ranks."""

    panel: str  # strong, weak; lines of the same panel share a plot
    label: str
    ranks: Sequence[int]
    efficiency: Sequence[float]
    measured: bool


def draw_scaling(path: Path, title: str, lines: Sequence[EfficiencyLine]) -> str:
    """Writes a PNG; returns a line that reports its path, or that matplotlib is missing. Raises
    UserError like save_png()."""
    return save_png(path, lambda: _scaling_figure(title, lines))


def _scaling_figure(title: str, lines: Sequence[EfficiencyLine]) -> Figure:
    panels = list(dict.fromkeys(line.panel for line in lines))
    figure, all_axes = new_figure(1, len(panels), height=4.6, width=4.8 * len(panels), sharey=True)
    for axes, panel in zip(all_axes, panels, strict=True):
        measured = [line for line in lines if line.panel == panel and line.measured]
        predicted = [line for line in lines if line.panel == panel and not line.measured]
        for line in measured:
            axes.plot(line.ranks, line.efficiency, "o", color="#000000", label=line.label)
        for index, line in enumerate(predicted):
            axes.plot(
                line.ranks,
                line.efficiency,
                linewidth=1.8,
                label=f"predicted: {line.label}",
                **run_style(index),
            )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.set_title(f"{panel} scaling", fontsize=10)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.axes[0].set_ylabel("efficiency")
    figure.axes[0].set_ylim(
        0, max(1.05, *(1.05 * value for line in lines for value in line.efficiency))
    )
    figure.suptitle(title, fontsize=10)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    return figure
