"""The figures of what was learned: loss, accuracy, learning rate and batch, noise scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.report.figures.style import GREY, HEIGHT, from_zero, heights, legend, line, look, new, powers_of_ten, runs
from hvdtrain.report.run import Fields, Record, number
from hvdtrain.report.summary import finite, targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FAR = 50  # times as large: then by powers of ten


def loss(records: Sequence[Record], labels: Sequence[str]) -> Figure | None:
    """Training loss at every meeting of the ranks, validation loss at every evaluation."""
    return _learned(records, labels, "loss", "loss")


def accuracy(records: Sequence[Record], labels: Sequence[str]) -> Figure | None:
    """As the loss; with the targets."""
    return _learned(records, labels, "accuracy", "accuracy")


def _learned(records: Sequence[Record], labels: Sequence[str], name: str, title: str) -> Figure | None:
    """One colour for each run; with one run, one for training and one for validation."""
    figure, (axes,) = new()
    shown, alone = set(), len(records) == 1
    for place, record in enumerate(records):
        steps = record.steps() if any(math.isfinite(number(event, name)) for event in record.steps()) else []
        train = [(event, number(event, name)) for event in steps] or [(e, number(e, f"train_{name}")) for e in record.epochs()]
        val = [(event, number(event, f"val_{name}")) for event in record.epochs()]
        thin = {"linewidth": 1.0, "alpha": 0.8}
        marked = look(1 if alone else place) | {"linewidth": 1.6, "marker": "o", "markersize": 3.5}
        drawn = line(axes, _epochs(record, train), [value for _, value in train], **look(place) | thin)
        shown |= {"train"} if drawn else set()
        shown |= {"val"} if line(axes, _epochs(record, val), [value for _, value in val], **marked) else set()
    if not shown:
        return None
    axes.set_xlabel("epochs done")
    axes.set_xlim(left=0)
    axes.set_ylabel(title)
    if name == "accuracy":
        _targets(axes, records)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    else:
        _scale(axes)
    train_look: dict[str, Any] = {"color": look(0)["color"] if alone else GREY, "linewidth": 1.0}
    val_look: dict[str, Any] = {"color": look(1)["color"] if alone else GREY, "marker": "o", "markersize": 3.5}
    val_look |= {"linestyle": look(1)["linestyle"]} if alone else {}
    both = [entry for key, entry in {"train": ("training", train_look), "val": ("validation", val_look)}.items() if key in shown]
    legend(figure, [*runs(labels), *both])
    return figure


def _epochs(record: Record, points: Sequence[tuple[Fields, float]]) -> list[float]:
    """Epochs done at each event: a job may be evaluated, and end, in the middle of one."""
    done = {event["step"]: number(event, "epochs") for event in record.steps()}
    return [done.get(event["step"], number(event, "epoch")) for event, _ in points]


def _scale(axes: Axes) -> None:
    """Powers of ten where most of what is drawn would else lie flat on the axis."""
    values = heights(axes)
    low = sorted(values)[len(values) // 10]
    if min(values) > 0 and max(values) > _FAR * low:
        powers_of_ten(axes)
    elif min(values) >= 0:
        from_zero(axes)


def _targets(axes: Axes, records: Sequence[Record]) -> None:
    wanted = {target.accuracy for record in records for target in targets(record)}
    wanted |= {number({"target": record.config.get("stop.target_accuracy")}, "target") for record in records}
    for target in sorted(finite(wanted)):
        axes.axhline(target, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
        spot: dict[str, Any] = {"textcoords": "offset points", "xycoords": ("axes fraction", "data"), "va": "bottom", "ha": "left"}
        spot |= {"bbox": {"facecolor": "#FFFFFF", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}}
        axes.annotate(f"target {100 * target:.4g}%", (0, target), (4, 2), color="#444444", fontsize=8, **spot)


def rates(records: Sequence[Record], labels: Sequence[str]) -> Figure | None:
    """Learning rate and global batch of each step."""
    figure, (lr, batch) = new(2, sharex=True, height=HEIGHT + 0.5, height_ratios=(3, 2))
    shown = False
    for place, record in enumerate(records):
        points = [(event, number(event, "lr")) for event in record.steps() or record.epochs()]
        x, kind = _epochs(record, points), look(place) | {"linewidth": 1.6, "drawstyle": "steps-pre"}
        shown |= line(lr, x, [value for _, value in points], **kind)
        shown |= line(batch, x, [number(event, "batch") for event, _ in points], **kind)
    if not shown:
        return None
    lr.set_ylabel("learning rate")
    batch.set_ylabel("global batch")
    batch.set_xlabel("epochs done")
    batch.set_xlim(left=0)
    from_zero(lr)
    from_zero(batch)
    batch.yaxis.set_major_formatter("{x:,.0f}")
    figure.align_ylabels()
    legend(figure, runs(labels))
    return figure


def noise_scale(records: Sequence[Record], labels: Sequence[str]) -> Figure | None:
    """The gradient noise scale, and the batch that it is to be compared with."""
    figure, (axes,) = new()
    shown = False
    for place, record in enumerate(records):
        points = [(event, number(event, "noise_scale")) for event in record.steps()]
        if not finite(value for _, value in points):
            points = [(event, number(event, "noise_scale")) for event in record.epochs()]
        drawn = line(axes, x := _epochs(record, points), [value for _, value in points], **look(place) | {"linewidth": 1.4})
        shown |= drawn
        if drawn:
            line(axes, x, [number(event, "batch") for event, _ in points], color=look(place)["color"], linewidth=1.0, linestyle=":")
    if not shown:
        return None
    powers_of_ten(axes)
    axes.set_xlabel("epochs done")
    axes.set_xlim(left=0)
    axes.set_ylabel("samples")
    scale = {"color": GREY if len(labels) > 1 else look(0)["color"], "linewidth": 1.4}
    legend(figure, [*runs(labels), ("noise scale", scale), ("global batch", scale | {"linestyle": ":"})])
    return figure
