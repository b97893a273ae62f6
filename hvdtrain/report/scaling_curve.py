"""The efficiency of more and more ranks, measured and predicted, as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.errors import UserError

# Okabe and Ito's colours, which colour-blind readers can tell apart, with a dash for each: predictions may lie on each other.
_LOOKS = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", ":"), ("#CC79A7", "-."), ("#E69F00", (0, (6, 2, 1, 2))))
_DPI = 150


class Line(NamedTuple):
    """Efficiencies, at most 1 of a perfect job, of some numbers of ranks."""

    panel: str  # lines of one name share a plot
    label: str
    ranks: Sequence[int]
    efficiency: Sequence[float]
    measured: bool


def draw(path: Path, title: str, lines: Sequence[Line]) -> str:
    """Writes a PNG, and gives the line that says so, or that says why there is none."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return "no picture: matplotlib is not installed; pip install 'hvdtrain[plot]'"
    panels = list(dict.fromkeys(line.panel for line in lines))
    figure = Figure(figsize=(4.8 * len(panels), 4.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        looks = itertools.cycle(_LOOKS)
        for line in (line for line in lines if line.panel == panel):
            if line.measured:
                axes.plot(line.ranks, line.efficiency, "o", color="#000000", label=line.label)
            else:
                colour, dash = next(looks)
                axes.plot(line.ranks, line.efficiency, color=colour, linestyle=dash, linewidth=1.8, label=f"predicted: {line.label}")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.set_title(f"{panel} scaling", fontsize=10)
        axes.grid(color="#DDDDDD", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.axes[0].set_ylabel("efficiency")
    figure.axes[0].set_ylim(0, max(1.05, *(1.05 * value for line in lines for value in line.efficiency)))
    figure.suptitle(title, fontsize=10)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    try:
        with path.open("wb") as file:
            FigureCanvasAgg(figure).print_figure(file, format="png", dpi=_DPI)
    except OSError as error:
        raise UserError(f"cannot write the picture: {error}", "--png", "give a file that can be written") from None
    return f"picture: {path}"
