"""The figure of `plan`: learning rate and global batch over the epochs of a job."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.report.figures.files import save_png
from hvdtrain.report.figures.style import new_figure, run_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class RecipeCurve(NamedTuple):
    """Learning rate and batch at some steps, in order; each value holds until the next."""

    label: str
    epochs: Sequence[float]  # done before each step
    lr: Sequence[float]
    batch: Sequence[int]  # samples over all ranks


def draw(path: Path, title: str, curves: Sequence[RecipeCurve]) -> str:
    """Writes a PNG; returns a line for people: where it is, or that matplotlib is missing. Raises UserError as save_png()."""
    return save_png(path, lambda: _figure(title, curves))


def _figure(title: str, curves: Sequence[RecipeCurve]) -> Figure:
    figure, (lr_axes, batch_axes) = new_figure(2, height=6.4, width=9.6, sharex=True, height_ratios=(2, 1))
    for index, curve in enumerate(curves):
        lr_axes.plot(curve.epochs, curve.lr, label=curve.label, drawstyle="steps-post", linewidth=1.8, **run_style(index))
        batch_axes.plot(curve.epochs, curve.batch, drawstyle="steps-post", linewidth=1.8, **run_style(index))
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
    """A logarithmic axis where more than a tenth of the values would lie flat on a linear one; else an axis from 0."""
    tenth_percentile = sorted(positive)[len(positive) // 10] if positive else 0.0
    if positive and max(positive) > 200 * tenth_percentile:
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(max(min(positive), tenth_percentile / 30) / 1.5, max(positive) * 1.5)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.06 * max(positive, default=1.0))


def _scale_batch(axes: Axes, batches: list[int]) -> None:
    """Powers of two where the largest batch is 8 times the smallest; a tick for every batch if they are few."""
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
