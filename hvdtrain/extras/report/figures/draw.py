"""The figures of a report, in order. This module draws training figures: loss, metrics, classes,
learning rate and batch, noise scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.errors import UserError
from hvdtrain.extras.figures.figure import (
    GREY,
    HEIGHT,
    LineStyle,
    drawn_values,
    integer_ticks,
    literal,
    log_scale,
    new_figure,
    run_style,
)
from hvdtrain.extras.report.figures import ranks, speed
from hvdtrain.extras.report.figures.canvas import (
    EACH_SEED,
    MEAN_OF_SEEDS,
    LegendEntry,
    Point,
    draw_line,
    group_entries,
    legend,
    mark_resumes,
    resumed_entry,
    scale_from_zero,
    styled,
)
from hvdtrain.extras.report.figures.seeds import draw_mean, finite_points
from hvdtrain.extras.report.measures.groups import RunGroup, group_runs
from hvdtrain.extras.report.measures.results import (
    calibration_of,
    class_names,
    confusion_shares,
    curves_of,
    evaluated_data,
    evaluations_of,
    finite_values,
    logged_names,
    logged_steps,
)
from hvdtrain.extras.report.measures.summary import finite, first_finite, resumes, targets
from hvdtrain.records.run import (
    Fields,
    RunMetric,
    RunRecord,
    metrics_of,
    number,
    numbers,
    objective_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOG_SCALE_FROM = (
    50  # the axis is logarithmic if the largest value is this many times the tenth percentile
)
_MOST_METRICS = 6  # in a figure
_NAME_HEIGHT = 0.05  # of a target, as a fraction of the axes
_TRAIN: LineStyle = {"linewidth": 1.0}
# training below validation, by whether it has a colour of its own
_BELOW: dict[bool, LineStyle] = {
    True: {"alpha": 0.65},
    False: {"alpha": 0.45, "linewidth": 0.8, "linestyle": "-"},
}
_VAL: LineStyle = {"marker": "o", "markersize": 3.5}
_MOST_NAMES = 30  # classes up to which their names are written on the axes
_MOST_NUMBERS = 12  # classes up to which shares are written into the cells
_DARK = 0.5  # shares above this are written in white


def loss(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Training loss of every step event, validation loss of every evaluation; None if no run has
    any."""
    groups = group_runs(runs, labels)
    figure, (axes,) = new_figure()
    curves = _draw_train_and_val(axes, groups, "loss")
    if not curves.entries:
        return None
    axes.set_ylabel("loss")
    _scale_loss(axes)
    _draw_targets(axes, runs, "loss")
    legend(figure, _curve_entries(groups, curves, _mark_starts(axes, groups)))
    return figure


def accuracy(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws the objective over time, like the loss, with a line for each target."""
    from matplotlib.ticker import PercentFormatter

    groups = group_runs(runs, labels)
    figure, (axes,) = new_figure()
    curves = _draw_train_and_val(axes, groups, "accuracy")
    if not curves.entries:
        return None
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _draw_targets(axes, runs, "accuracy")
    legend(figure, _curve_entries(groups, curves, _mark_starts(axes, groups)))
    return figure


def metrics(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws the other metrics of the runs' tasks, one plot for each; None if no run has any."""
    names = [name for run in runs for name in metrics_of(run) if name not in ("loss", "accuracy")]
    known = list(dict.fromkeys(name for name in names if any(_has(run, name) for run in runs)))[
        :_MOST_METRICS
    ]
    if not known:
        return None
    groups = group_runs(runs, labels)
    figure, all_axes = new_figure(len(known), sharex=True, height=HEIGHT * (1 + len(known)) / 2)
    curves = _Curves([], [])
    for name, axes in zip(known, all_axes, strict=True):
        curves = _draw_train_and_val(axes, groups, name)
        axes.set_ylabel(literal(name))
        _draw_targets(axes, runs, name)
    for axes in all_axes[:-1]:
        axes.set_xlabel("")
    legend(figure, _curve_entries(groups, curves, _mark_starts(all_axes[-1], groups)))
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
    groups = group_runs(runs, labels)
    figure, all_axes = new_figure(len(known), sharex=True, height=HEIGHT * (1 + len(known)) / 2)
    for name, axes in zip(known, all_axes, strict=True):
        for index, group in enumerate(groups):
            curves = [_curve(run, *logged_steps(run, name)) for run in group.runs]
            draw_mean(axes, curves, **run_style(index) | _VAL)
        axes.set_ylabel(literal(name))
    all_axes[-1].set_xlabel("epochs done")
    all_axes[-1].set_xlim(left=0)
    marked = _mark_starts(all_axes[-1], groups)
    legend(figure, [*group_entries(groups, MEAN_OF_SEEDS), *resumed_entry(marked)])
    return figure


def _has(run: RunRecord, metric: str) -> bool:
    return bool(
        finite(number(event, f"val_{metric}") for event in run.epoch_events())
        or finite(_train_values(run, metric)[1])
    )


class _Curves(NamedTuple):
    """What a figure of training and validation shows."""

    entries: list[LegendEntry]  # training, validation, or both
    runs: list[int]  # how many runs of each group


def _draw_train_and_val(axes: Axes, groups: Sequence[RunGroup], metric: str) -> _Curves:
    """Draws a metric over the epochs. A colour for each group; with a single one a colour for
    training and one for validation, which is drawn over it."""
    single = len(groups) == 1
    trained: list[int] = []
    validated: list[int] = []
    for index, group in enumerate(groups):
        train = [_curve(run, *_train_values(run, metric)) for run in group.runs]
        val = [
            _curve(run, events, [number(event, f"val_{metric}") for event in events])
            for run in group.runs
            for events in [run.epoch_events()]
        ]
        below = _BELOW[single] if any(val) else {"alpha": 0.8}
        trained.append(draw_mean(axes, train, **run_style(index) | _TRAIN | below))
        style = run_style(1 if single else index) | _VAL | {"linewidth": 1.6, "zorder": 3}
        validated.append(draw_mean(axes, val, **style))
    axes.set_xlabel("epochs done")
    axes.set_xlim(left=0)
    entries: list[LegendEntry] = []
    if any(trained):
        entries.append(("training", _TRAIN | {"color": run_style(0)["color"] if single else GREY}))
    if any(validated):
        entries.append(("validation", _VAL | (run_style(1) if single else {"color": GREY})))
    return _Curves(entries, validated if any(validated) else trained)


def _curve_entries(groups: Sequence[RunGroup], curves: _Curves, marked: bool) -> list[LegendEntry]:
    of_groups = group_entries(groups, MEAN_OF_SEEDS, curves.runs)
    if len(groups) == 1 and of_groups:  # the line of training or validation shows its colour
        name = f"{curves.entries[-1][0]}, {of_groups[0][0]}"
        return [*curves.entries[:-1], (name, curves.entries[-1][1]), *resumed_entry(marked)]
    return [*of_groups, *curves.entries, *resumed_entry(marked)]


def _curve(run: RunRecord, events: Sequence[Fields], values: Sequence[float]) -> list[Point]:
    """Returns points over the epochs."""
    return finite_points(_epochs(run, events), values)


def _mark_starts(axes: Axes, groups: Sequence[RunGroup]) -> bool:
    """Marks where jobs were resumed, on an axis of epochs; returns whether there are any."""
    marked = [
        mark_resumes(
            axes, _epochs_at(run, [start["step"] for start in resumes(run)]), style["color"]
        )
        for run, style in styled(groups)
    ]
    return any(marked)


def _epochs_at(run: RunRecord, steps: Sequence[float]) -> list[float]:
    """Returns the epochs done at steps, between those of the events; empty if no event has
    epochs."""
    import numpy as np

    events = [*run.step_events(), *run.epoch_events()]
    known = finite_points([event["step"] for event in events], _epochs(run, events))
    if not steps or not known:
        return []
    of_events, epochs = zip(*[(0.0, 0.0), *known], strict=True)
    return [float(value) for value in np.interp(steps, of_events, epochs)]


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
    """Draws a horizontal line for each target that a run reached or is configured with, if the
    metric is its objective."""
    runs = [run for run in runs if objective_of(run).name == metric]
    values = {target.value for run in runs for target in targets(run)}
    values |= {number({"target": run.config.get("stop.target")}, "target") for run in runs}
    known = sorted(finite(values))
    for value in known:
        axes.axhline(value, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1.5)
    if known:
        _name_targets(axes, known, objective_of(runs[0]))


def _name_targets(axes: Axes, values: Sequence[float], objective: RunMetric) -> None:
    """Writes the values of targets, ascending, at the right of the axes, where they cover no line;
    those of close targets above each other."""
    axes.autoscale_view()
    bottom, top = axes.transAxes.transform([(0, 0), (0, 1)])[:, 1]
    position = -math.inf
    for value in values:
        line = (axes.transData.transform((0, value))[1] - bottom) / (top - bottom)
        if not 0 <= line <= 1:
            continue
        position = max(line, position + _NAME_HEIGHT)
        text = f"{100 * value:.4g}%" if objective.percent else f"{value:.4g}"
        axes.annotate(
            f"target {text}",
            (1.0, position),
            (4, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            color="#444444",
            fontsize=8,
            va="center",
            ha="left",
        )


def rates(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws the learning rate and global batch of each step event."""
    figure, (lr_axes, batch_axes) = new_figure(
        2, sharex=True, height=HEIGHT + 0.5, height_ratios=(3, 2)
    )
    groups = group_runs(runs, labels)
    drawn = False
    for run, group_style in styled(groups):
        events = run.step_events() or run.epoch_events()
        x = _epochs(run, events)
        style = group_style | {"linewidth": 1.6, "drawstyle": "steps-pre"}
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
    marked = _mark_starts(batch_axes, groups)
    legend(figure, [*group_entries(groups, EACH_SEED), *resumed_entry(marked)])
    return figure


def noise_scale(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws the gradient noise scale, with the global batch to compare it with."""
    figure, (axes,) = new_figure()
    groups = group_runs(runs, labels)
    drawn = False
    for run, group_style in styled(groups):
        has_steps = finite(number(event, "noise_scale") for event in run.step_events())
        events = run.step_events() if has_steps else run.epoch_events()
        x = _epochs(run, events)
        if draw_line(
            axes,
            x,
            [number(event, "noise_scale") for event in events],
            **group_style | {"linewidth": 1.4},
        ):
            drawn = True
            batch = [number(event, "batch") for event in events]
            draw_line(axes, x, batch, color=group_style["color"], linewidth=1.0, linestyle=":")
    if not drawn:
        return None
    log_scale(axes)
    axes.set_xlabel("epochs done")
    axes.set_xlim(left=0)
    axes.set_ylabel("samples")
    style = {"color": GREY if len(groups) > 1 else run_style(0)["color"], "linewidth": 1.4}
    legend(
        figure,
        [
            *group_entries(groups, EACH_SEED),
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


def curves(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """ROC, precision over recall, and calibration in the last evaluation of one run; None for
    several runs, and without curves. Of two classes the second is drawn."""
    last = next(reversed(evaluations_of(runs[0])), None) if len(runs) == 1 else None
    roc = curves_of(last, "roc") if last else {}
    if last is None or not roc:
        return None
    classes = len(last["roc"])
    names = class_names(last, classes)
    shown = [1] if classes == 2 and 1 in roc else list(roc)
    figure, (left, middle, right) = new_figure(3, height=2.4 * HEIGHT)
    areas = dict(enumerate(numbers(last, "class_auroc")))
    entries: list[LegendEntry] = []
    for index, label in enumerate(shown):
        style = run_style(index) | {"linewidth": 1.4}
        left.plot(*roc[label], **style)
        if label in (recalls := curves_of(last, "precision_recall")):
            middle.plot(*recalls[label], **style)
        area = f", AUROC {areas[label]:.3f}" if 0 <= areas.get(label, -1) <= 1 else ""
        entries.append((f"{names[label]}{area}", style))
    calibration = calibration_of(last)
    if calibration is not None:
        right.plot(*calibration, color=run_style(0)["color"], marker="o", markersize=3.5)
    for axes, x, y in (
        (left, "false positive rate", "true positive rate"),
        (middle, "recall", "precision"),
        (right, "probability of the predicted class", "accuracy"),
    ):
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel=x, ylabel=y)
    for axes in (left, right):
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
    left.set_title(literal(evaluated_data(last)[:80]), fontsize=9)
    legend(figure, entries)
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
        "curves",
        "Thresholds and calibration",
        "ROC, precision and recall of each class, and accuracy by probability, in the last "
        "evaluation.",
        curves,
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
        "Each rank's own work in a step; a rank 10% above the median is marked.",
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
