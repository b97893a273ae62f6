"""The figure of lr-find: the loss over learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.extras.figures.figure import COLOURS, GREY, literal, new_figure, save_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_rates(
    path: Path,
    title: str,
    losses: Sequence[tuple[float, float]],
    smoothed: Sequence[tuple[float, float]],
    proposal: float | None,
) -> str:
    """Writes a PNG of (rate, loss) in each step, of the smoothed loss, and of the proposed rate.
    Returns a line for people."""
    return save_png(path, lambda: _rates_figure(title, losses, smoothed, proposal))


def _rates_figure(
    title: str,
    losses: Sequence[tuple[float, float]],
    smoothed: Sequence[tuple[float, float]],
    proposal: float | None,
) -> Figure:
    figure, (axes,) = new_figure(1, height=4.8, width=8.0)
    axes.plot(*zip(*losses, strict=True), ".", color=GREY, label="each step")
    axes.plot(*zip(*smoothed, strict=True), color=COLOURS[0], linewidth=1.8, label="smoothed")
    if proposal is not None:
        axes.axvline(
            proposal,
            color=COLOURS[1],
            linestyle="--",
            linewidth=1.2,
            label=f"optim.base_lr={proposal:.2g}",
        )
    first = smoothed[0][1]
    lowest = min(loss for _, loss in smoothed)
    axes.set_ylim(
        max(0.0, lowest - 0.1 * (first - lowest)),
        first + 0.6 * max(first - lowest, 0.1 * abs(first)),
    )
    axes.set_xscale("log")
    axes.set_xlabel("optim.base_lr")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    figure.suptitle(literal(title), fontsize=10)
    return figure
