"""The figure of landscape: loss along lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.extras.figures.figure import COLOURS, GREY, literal, new_figure, save_png
from hvdtrain.extras.landscape.surface import Sharpness

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Line(NamedTuple):
    """The loss, and another metric if the task has one, at points of a line."""

    name: str
    at: list[float]  # 0: the weights of the run, or of the first run
    loss: list[float]
    metric: str | None
    values: list[float]  # of the metric

    def loss_at(self, x: float) -> float:
        """Returns the loss at the nearest point."""
        return min(zip(self.at, self.loss, strict=True), key=lambda point: abs(point[0] - x))[1]


def draw_lines(
    path: Path, title: str, lines: Sequence[Line], sharp: Mapping[str, Sharpness]
) -> str:
    """Writes a PNG; returns a line for people. Raises UserError as save_png()."""
    if not lines:
        return "no picture: no line was measured"
    return save_png(path, lambda: _figure(title, lines, sharp))


def _figure(title: str, lines: Sequence[Line], sharp: Mapping[str, Sharpness]) -> Figure:
    groups = [
        group
        for group in (
            [line for line in lines if line.at[-1] > 1],
            [line for line in lines if line.at[-1] <= 1],
        )
        if group
    ]
    figure, panels = new_figure(1, len(groups), height=4.4, width=5.4 * len(groups) + 1.0)
    for axes, group in zip(panels, groups, strict=True):
        is_between = group[0].at[-1] > 1
        runs = list(dict.fromkeys(line.name.rpartition(", direction ")[0] for line in group))
        folders = [Path(run).name for run in runs]
        names = folders if len(set(folders)) == len(runs) else runs
        for line in group:
            run = line.name.rpartition(", direction ")[0]
            first = line.name.endswith((" 1", "runs"))
            sharpness = f", sharpness {sharp[run].percent:.3g} %" if run in sharp else ""
            axes.plot(
                line.at,
                line.loss,
                color=COLOURS[runs.index(run) % len(COLOURS)],
                linewidth=1.5,
                label=literal(f"{names[runs.index(run)]}{sharpness}") if first else None,
            )
        if is_between and group[0].metric:
            right = axes.twinx()
            right.plot(group[0].at, group[0].values, color=GREY, linestyle="--", linewidth=1.2)
            right.set_ylabel(f"{group[0].metric} (dashed)", color=GREY)
            for x in (0.0, 1.0):
                axes.axvline(x, color=GREY, linewidth=0.8, linestyle=":")
        axes.set_yscale("log")
        axes.set_ylabel("loss")
        axes.set_xlabel(
            "0: the first run, 1: the second"
            if is_between
            else "distance in a direction as long as the weights, filter by filter"
        )
        if not is_between:
            axes.legend(frameon=False, fontsize=8)
    figure.suptitle(literal(title), fontsize=10)
    return figure
