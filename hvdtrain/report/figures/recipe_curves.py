"""The learning rate and the batch over the epochs of a job, as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.report.figures.files import save
from hvdtrain.report.figures.style import look, new

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """One line: the numbers of some steps, in order; each holds until the next."""

    label: str
    epochs: Sequence[float]  # done before the step
    lr: Sequence[float]
    batch: Sequence[int]  # samples over all ranks


def draw(path: Path, title: str, curves: Sequence[Curve]) -> str:
    """Writes a PNG, and gives the line that says so, or that says why there is none."""
    return save(path, lambda: _figure(title, curves))


def _figure(title: str, curves: Sequence[Curve]) -> Figure:
    figure, (rate, batch) = new(2, height=6.4, width=9.6, sharex=True, height_ratios=(2, 1))
    for place, curve in enumerate(curves):
        rate.plot(curve.epochs, curve.lr, label=curve.label, drawstyle="steps-post", linewidth=1.8, **look(place))
        batch.plot(curve.epochs, curve.batch, drawstyle="steps-post", linewidth=1.8, **look(place))
    _scale_rate(rate, [value for curve in curves for value in curve.lr if value > 0])
    _scale_batch(batch, [value for curve in curves for value in curve.batch])
    rate.set_ylabel("learning rate")
    batch.set_ylabel("global batch (samples)")
    batch.set_xlabel("epochs done")
    batch.set_xlim(0, max(curve.epochs[-1] for curve in curves))
    figure.suptitle("\n".join(wrapped for line in title.splitlines() for wrapped in textwrap.wrap(line, 120)), fontsize=10)
    figure.legend(
        loc="outside lower center", ncols=min(len(curves), 2 if any(len(c.label) > 36 for c in curves) else 3), frameon=False, fontsize=9
    )
    return figure


def _scale_rate(axes: Axes, positive: list[float]) -> None:
    """Powers of ten where a tenth of what is drawn would else lie flat on the axis."""
    low = sorted(positive)[len(positive) // 10] if positive else 0.0
    if positive and max(positive) > 200 * low:
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(max(min(positive), low / 30) / 1.5, max(positive) * 1.5)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.06 * max(positive, default=1.0))


def _scale_batch(axes: Axes, batches: list[int]) -> None:
    """Powers of two where the batches lie far apart; every batch has its tick if they are few."""
    if max(batches) >= 8 * min(batches):
        axes.set_yscale("log", base=2)
        axes.set_ylim(min(batches) / 1.5, max(batches) * 1.5)
    else:
        axes.set_ylim(0, 1.15 * max(batches))
    known = sorted(set(batches))
    if len(known) <= 6:
        axes.set_yticks(known if axes.get_yscale() == "log" else [0, *known])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
