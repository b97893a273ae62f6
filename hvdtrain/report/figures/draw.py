"""The figures of a report, in order. This module draws training figures: loss, metrics, classes,
learning rate and batch, noise scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.errors import UserError
from hvdtrain.report.figures import ranks, speed
from hvdtrain.report.figures.canvas import new_figure
from hvdtrain.report.run import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure
from typing import TYPE_CHECKING, Any

from hvdtrain.report.figures.canvas import (
    GREY,
    HEIGHT,
    LegendEntry,
    LineStyle,
    draw_line,
    drawn_values,
    integer_ticks,
    legend,
    literal,
    log_scale,
    run_entries,
    run_style,
    scale_from_zero,
)
from hvdtrain.report.run import (
    Fields,
    class_names,
    confusion_shares,
    evaluated_data,
    evaluations_of,
    finite_values,
    logged_names,
    logged_steps,
    metrics_of,
    number,
    objective_of,
)
from hvdtrain.report.summary import finite, first_finite, targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOG_SCALE_FROM = (
    50  # the axis is logarithmic if the largest value is this many times the tenth percentile
)
_MOST_METRICS = 6  # in a figure
_TRAIN: LineStyle = {"linewidth": 1.0}
_VAL: LineStyle = {"marker": "o", "markersize": 3.5}
_MOST_NAMES = 30  # classes up to which their names are written on the axes
_MOST_NUMBERS = 12  # classes up to which shares are written into the cells
_DARK = 0.5  # shares above this are written in white


def loss(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Training loss of every step event, validation loss of every evaluation; None if no run has
    any."""
    figure, (axes,) = new_figure()
    legend_entries = _draw_train_and_val(axes, runs, "loss")
    if not legend_entries:
        return None
    axes.set_ylabel("loss")
    _scale_loss(axes)
    _draw_targets(axes, runs, "loss")
    legend(figure, [*run_entries(labels), *legend_entries])
    return figure


def accuracy(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws the objective over time, like the loss, with a line for each target."""
    figure, (axes,) = new_figure()
    legend_entries = _draw_train_and_val(axes, runs, "accuracy")
    if not legend_entries:
        return None
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    _draw_targets(axes, runs, "accuracy")
    legend(figure, [*run_entries(labels), *legend_entries])
    return figure


def metrics(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws the other metrics of the runs' tasks, one plot for each; None if no run has any."""
    names = [name for run in runs for name in metrics_of(run) if name not in ("loss", "accuracy")]
    known = list(dict.fromkeys(name for name in names if any(_has(run, name) for run in runs)))[
        :_MOST_METRICS
    ]
    if not known:
        return None
    figure, all_axes = new_figure(len(known), sharex=True, height=HEIGHT * (1 + len(known)) / 2)
    legend_entries: list[LegendEntry] = []
    for name, axes in zip(known, all_axes, strict=True):
        legend_entries = _draw_train_and_val(axes, runs, name)
        axes.set_ylabel(literal(name))
        _draw_targets(axes, runs, name)
    for axes in all_axes[:-1]:
        axes.set_xlabel("")
    legend(figure, [*run_entries(labels), *legend_entries])
    return figure


def logged(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws values that scripts logged and that other figures do not show, one plot for each name;
    None if no run has any."""
    names = dict.fromkeys(
        name for run in runs for name in logged_names(run) if name not in ("loss", "val_loss")
    )
    known = [name for name in names if any(finite_values(run, name) for run in runs)][
        :_MOST_METRICS
    ]
    if not known:
        return None
    figure, all_axes = new_figure(len(known), sharex=True, height=HEIGHT * (1 + len(known)) / 2)
    for name, axes in zip(known, all_axes, strict=True):
        for index, run in enumerate(runs):
            events, values = logged_steps(run, name)
            draw_line(axes, _epochs(run, events), values, **run_style(index) | _VAL)
        axes.set_ylabel(literal(name))
    all_axes[-1].set_xlabel("epochs done")
    all_axes[-1].set_xlim(left=0)
    legend(figure, run_entries(labels))
    return figure


def _has(run: RunRecord, metric: str) -> bool:
    return bool(
        finite(number(event, f"val_{metric}") for event in run.epoch_events())
        or finite(_train_values(run, metric)[1])
    )


def _draw_train_and_val(axes: Axes, runs: Sequence[RunRecord], metric: str) -> list[LegendEntry]:
    """Draws a metric over the epochs; returns legend entries for training and validation, if
    present.

    A colour for each run; with a single run one for training and one for validation.
    """
    single = len(runs) == 1
    has_train = has_val = False
    for index, run in enumerate(runs):
        train_events, train = _train_values(run, metric)
        val_events = run.epoch_events()
        val = [number(event, f"val_{metric}") for event in val_events]
        has_train |= draw_line(
            axes, _epochs(run, train_events), train, **run_style(index) | _TRAIN | {"alpha": 0.8}
        )
        has_val |= draw_line(
            axes,
            _epochs(run, val_events),
            val,
            **run_style(1 if single else index) | _VAL | {"linewidth": 1.6},
        )
    axes.set_xlabel("epochs done")
    axes.set_xlim(left=0)
    entries: list[LegendEntry] = []
    if has_train:
        entries.append(("training", _TRAIN | {"color": run_style(0)["color"] if single else GREY}))
    if has_val:
        entries.append(("validation", _VAL | (run_style(1) if single else {"color": GREY})))
    return entries


def _train_values(run: RunRecord, metric: str) -> tuple[list[Fields], list[float]]:
    """Events and the training metric in each: of steps, or of epochs if no step has it."""
    steps = [number(event, metric) for event in run.step_events()]
    if finite(steps):
        return run.step_events(), steps
    return run.epoch_events(), [number(event, f"train_{metric}") for event in run.epoch_events()]


def _epochs(run: RunRecord, events: Sequence[Fields]) -> list[float]:
    """Returns the epochs done at each event, as real numbers: a job may be evaluated, and end, in
    the middle of an epoch."""
    done = {event["step"]: number(event, "epochs") for event in run.step_events()}
    return [
        done.get(event["step"], first_finite(number(event, "epochs"), number(event, "epoch")))
        for event in events
    ]


def _scale_loss(axes: Axes) -> None:
    """Uses a logarithmic axis if most of the loss would be flat on a linear one; else an axis from
    0."""
    values = sorted(drawn_values(axes))
    tenth_percentile = values[len(values) // 10]
    if values[0] > 0 and values[-1] > _LOG_SCALE_FROM * tenth_percentile:
        log_scale(axes)
    elif values[0] >= 0:
        scale_from_zero(axes)


def _draw_targets(axes: Axes, runs: Sequence[RunRecord], metric: str) -> None:
    """A horizontal line for each target that a run reached or is configured with, if the metric is
    its objective."""
    runs = [run for run in runs if objective_of(run).name == metric]
    values = {target.value for run in runs for target in targets(run)}
    values |= {number({"target": run.config.get("stop.target")}, "target") for run in runs}
    position: dict[str, Any] = {
        "textcoords": "offset points",
        "xycoords": ("axes fraction", "data"),
        "va": "bottom",
        "ha": "left",
    }
    background = {"facecolor": "#FFFFFF", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
    for value in sorted(finite(values)):
        shown = f"{100 * value:.4g}%" if objective_of(runs[0]).percent else f"{value:.4g}"
        axes.axhline(value, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.annotate(
            f"target {shown}",
            (0, value),
            (4, 2),
            color="#444444",
            fontsize=8,
            bbox=background,
            **position,
        )


def rates(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Learning rate and global batch of each step event."""
    figure, (lr_axes, batch_axes) = new_figure(
        2, sharex=True, height=HEIGHT + 0.5, height_ratios=(3, 2)
    )
    drawn = False
    for index, run in enumerate(runs):
        events = run.step_events() or run.epoch_events()
        x = _epochs(run, events)
        style = run_style(index) | {"linewidth": 1.6, "drawstyle": "steps-pre"}
        drawn |= draw_line(lr_axes, x, [number(event, "lr") for event in events], **style)
        drawn |= draw_line(batch_axes, x, [number(event, "batch") for event in events], **style)
    if not drawn:
        return None
    lr_axes.set_ylabel("learning rate")
    batch_axes.set_ylabel("global batch")
    batch_axes.set_xlabel("epochs done")
    batch_axes.set_xlim(left=0)
    scale_from_zero(lr_axes)
    scale_from_zero(batch_axes)
    batch_axes.yaxis.set_major_formatter("{x:,.0f}")
    figure.align_ylabels()
    legend(figure, run_entries(labels))
    return figure


def noise_scale(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws the gradient noise scale, with the global batch to compare it with."""
    figure, (axes,) = new_figure()
    drawn = False
    for index, run in enumerate(runs):
        has_steps = finite(number(event, "noise_scale") for event in run.step_events())
        events = run.step_events() if has_steps else run.epoch_events()
        x = _epochs(run, events)
        if draw_line(
            axes,
            x,
            [number(event, "noise_scale") for event in events],
            **run_style(index) | {"linewidth": 1.4},
        ):
            drawn = True
            batch = [number(event, "batch") for event in events]
            draw_line(axes, x, batch, color=run_style(index)["color"], linewidth=1.0, linestyle=":")
    if not drawn:
        return None
    log_scale(axes)
    axes.set_xlabel("epochs done")
    axes.set_xlim(left=0)
    axes.set_ylabel("samples")
    style = {"color": GREY if len(labels) > 1 else run_style(0)["color"], "linewidth": 1.4}
    legend(
        figure,
        [
            *run_entries(labels),
            ("noise scale", style),
            ("global batch", style | {"linestyle": ":"}),
        ],
    )
    return figure


def confusion(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws shares of each class's samples by the model's prediction, for one run; None for several
    runs, and without a confusion matrix."""
    last = next(reversed(evaluations_of(runs[0])), None) if len(runs) == 1 else None
    shares = confusion_shares(last) if last else None
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
        names = [literal(name) for name in class_names(last, classes)]
        axes.set_xticks(range(classes), names, rotation=90, fontsize=8)
        axes.set_yticks(range(classes), names, fontsize=8)
    else:
        integer_ticks(axes.xaxis, axes.yaxis)
    if classes <= _MOST_NUMBERS:
        for row, values in enumerate(shares):
            for column, share in enumerate(values):
                if share >= 0.005:
                    colour = "white" if share >= _DARK else "black"
                    axes.text(
                        column,
                        row,
                        f"{100 * share:.0f}",
                        ha="center",
                        va="center",
                        fontsize=7,
                        color=colour,
                    )
    axes.set_xlabel("what the model says")
    axes.set_ylabel("class")
    axes.set_title(literal(evaluated_data(last)[:80]), fontsize=9)
    return figure


# draws runs with their labels; None if there is nothing to show
_Draw = Callable[[Sequence[RunRecord], Sequence[str]], "Figure | None"]


class FigureKind(NamedTuple):
    name: str  # of its file: report-NAME.png
    title: str
    description: str  # one sentence; the alternative text too
    draw: _Draw


class DrawnFigure(NamedTuple):
    kind: FigureKind
    figure: Figure


KINDS = (
    FigureKind("loss", "Loss", "Training and validation loss over the epochs.", loss),
    FigureKind(
        "accuracy",
        "Accuracy",
        "Training and validation accuracy over the epochs, with the targets.",
        accuracy,
    ),
    FigureKind(
        "metrics",
        "Metrics",
        "The other metrics of training and validation over the epochs, with the targets.",
        metrics,
    ),
    FigureKind(
        "logged",
        "Logged by the script",
        "What a script with a loop of its own has logged, over the epochs.",
        logged,
    ),
    FigureKind(
        "confusion",
        "What each class is taken for",
        "Percent of each class's samples, in the last evaluation.",
        confusion,
    ),
    FigureKind(
        "rates", "Learning rate and batch", "Learning rate and global batch over the epochs.", rates
    ),
    FigureKind(
        "throughput",
        "Throughput",
        "Training samples per second over the time of the job.",
        speed.throughput,
    ),
    FigureKind(
        "phases",
        "Time of a step",
        "Milliseconds of a step by phase; communication is waiting for gradients.",
        speed.phases,
    ),
    FigureKind(
        "ranks",
        "Ranks",
        "Each rank's own work in a step, without communication, and the slowest rank.",
        ranks.own_work,
    ),
    FigureKind(
        "mesh",
        "Time of each rank",
        "Milliseconds of a step: computing, waiting for other stages, communication.",
        ranks.time_of_ranks,
    ),
    FigureKind(
        "pipeline",
        "Passes of a pipeline",
        "One step over time, numbered by micro-batch; gaps are waiting.",
        ranks.timeline,
    ),
    FigureKind(
        "scaling",
        "More ranks",
        "Speed-up, efficiency and energy relative to the fewest ranks.",
        ranks.scaling,
    ),
    FigureKind(
        "noise",
        "Noise scale",
        "The gradient noise scale: batches far above it save few steps.",
        noise_scale,
    ),
    FigureKind(
        "memory", "Memory", "Memory of the largest rank over the time of the job.", speed.memory
    ),
    FigureKind(
        "power",
        "Power and energy",
        "Watts over the time of the job, and joules per image of each epoch.",
        speed.power,
    ),
)


def draw_all(
    runs: Sequence[RunRecord],
    labels: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> list[DrawnFigure]:
    """Draws the figures that have something to show. progress: called with a line before each.
    Raises UserError if matplotlib is missing."""
    try:
        new_figure()
    except ModuleNotFoundError:
        raise UserError("matplotlib is not installed", "report", "pip install matplotlib") from None
    drawn: list[DrawnFigure] = []
    for done, kind in enumerate(KINDS, start=1):
        progress(f"drawing: {done} of {len(KINDS)}")
        figure = kind.draw(runs, labels)
        if figure:
            drawn.append(DrawnFigure(kind, figure))
    return drawn
