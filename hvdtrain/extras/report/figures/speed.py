"""The figures of speed: samples per second, where the time of a step goes, memory, power."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.extras.figures.figure import COLOURS, GREY, HEIGHT, LineStyle, new_figure, run_style
from hvdtrain.extras.report.figures.canvas import (
    MEAN_OF_SEEDS,
    LegendEntry,
    Point,
    group_entries,
    legend,
    mark_resumes,
    resumed_entry,
    row_names,
    scale_from_zero,
    styled,
    time_unit,
)
from hvdtrain.extras.report.figures.seeds import draw_mean, finite_points
from hvdtrain.extras.report.measures.groups import RunGroup, group_runs
from hvdtrain.extras.report.measures.summary import finite, first_finite, job_seconds, resumes
from hvdtrain.records.run import Fields, RunRecord, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = {  # in the order of a step; communication is waiting for gradients
    "data": "#56B4E9",
    "forward": "#0072B2",
    "backward": "#009E73",
    "compute": "#009E73",
    "communication": "#D55E00",
    "update": "#E69F00",
    "other": "#999999",
}
_MOST_BARS = 60
_MOST_BAR_LABELS = 12


class _Series(NamedTuple):
    """A field of events that is drawn over the time of the job."""

    field: str
    events_of: Callable[[RunRecord], list[Fields]]
    style: LineStyle

    def points(self, run: RunRecord, unit_s: float) -> list[Point]:
        """Returns (time of the job in this unit, value) of the events with a value."""
        events = self.events_of(run)
        times = [run.seconds_at(event) / unit_s for event in events]
        return finite_points(times, [number(event, self.field) for event in events])

    def has_values(self, runs: Sequence[RunRecord]) -> bool:
        return bool(
            finite(number(event, self.field) for run in runs for event in self.events_of(run))
        )


def throughput(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws the samples per second of every step event."""
    series = _Series("samples_per_s", RunRecord.step_events, {"linewidth": 1.0, "alpha": 0.8})
    if not series.has_values(runs):
        return None
    groups = group_runs(runs, labels)
    figure, (axes,) = new_figure()
    marked = _draw_over_time(axes, groups, [series])
    axes.set_ylabel("samples/s")
    axes.yaxis.set_major_formatter("{x:,g}")
    legend(figure, [*group_entries(groups, MEAN_OF_SEEDS), *resumed_entry(marked)])
    return figure


def memory(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws the memory of the rank that uses most."""
    groups = group_runs(runs, labels)
    single = len(groups) == 1
    gpu_style: LineStyle = {"linewidth": 1.6, "linestyle": (0, (1, 1.2))} | (
        {"color": COLOURS[1]} if single else {}
    )
    host = _Series("memory_mb", RunRecord.step_events, {"linewidth": 1.6, "linestyle": "-"})
    gpu = _Series("gpu_memory_mb", RunRecord.step_events, gpu_style)
    drawn = [series for series in (host, gpu) if series.has_values(runs)]
    if not drawn:
        return None
    figure, (axes,) = new_figure()
    marked = _draw_over_time(axes, groups, drawn)
    axes.set_ylabel("MB, largest rank")
    axes.yaxis.set_major_formatter("{x:,g}")
    entries: list[LegendEntry] = []
    if host in drawn:
        entries.append(("host memory", {"color": COLOURS[0] if single else GREY}))
    if gpu in drawn:
        entries.append(("GPU memory, peak", {"color": GREY} | gpu_style))
    of_groups = group_entries(groups, MEAN_OF_SEEDS, linestyle="-")
    if single and of_groups:  # the lines of the memory show the colours
        entries = [(f"{name}, {of_groups[0][0]}", style) for name, style in entries]
        of_groups = []
    legend(figure, [*of_groups, *entries, *resumed_entry(marked)])
    return figure


def power(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws the watts of every step event and the joules per image of each epoch, if they were
    measured."""
    style: LineStyle = {"linewidth": 1.4}
    panels = [
        ("W", _Series("watts", RunRecord.step_events, style)),
        ("J per image", _Series("joules_per_sample", RunRecord.epoch_events, style)),
    ]
    panels = [(unit, series) for unit, series in panels if series.has_values(runs)]
    if not panels:
        return None
    groups = group_runs(runs, labels)
    figure, all_axes = new_figure(len(panels), sharex=True, height=HEIGHT + 0.8 * (len(panels) - 1))
    marked = False
    for axes, (unit, series) in zip(all_axes, panels, strict=True):
        marked |= _draw_over_time(axes, groups, [series])
        axes.set_ylabel(unit)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.label_outer()  # the time axis is labelled once, at the bottom
    figure.align_ylabels()
    legend(figure, [*group_entries(groups, MEAN_OF_SEEDS), *resumed_entry(marked)])
    return figure


def _draw_over_time(axes: Axes, groups: Sequence[RunGroup], series: Sequence[_Series]) -> bool:
    """Draws lines over the time of the job; both axes start at 0. Returns whether a job was
    resumed, which is marked."""
    runs = list(styled(groups))
    unit = time_unit(max(first_finite(job_seconds(run), 0.0) for run, _ in runs))
    for index, group in enumerate(groups):
        for one in series:
            curves = [one.points(run, unit.seconds) for run in group.runs]
            draw_mean(axes, curves, **run_style(index) | one.style)
    axes.set_xlabel(f"time of the job ({unit.name})")
    axes.set_xlim(left=0)
    scale_from_zero(axes)
    marked = False
    for run, style in runs:
        x = [run.seconds_at(start) / unit.seconds for start in resumes(run)]
        marked |= mark_resumes(axes, x, style["color"])
    return marked


def phases(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Draws milliseconds of a step by phase: over the epochs of a single run, or a bar for each of
    several."""
    timed = [
        (label, run) for label, run in zip(labels, runs, strict=True) if phase_ms(run.step_events())
    ]
    if not timed:
        return None
    if len(runs) == 1:
        return _phases_of_epochs(timed[0][1])
    bars = [phase_ms(run.step_events()) for _, run in timed]
    names = row_names([label for label, _ in timed])
    figure, (axes,) = new_figure(height=1.4 + names.height * len(bars))
    entries = _stack_bars(bars, axes.barh, "left")
    axes.set_yticks(range(len(bars)), names.texts, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms of one step, mean over ranks")
    legend(figure, entries)
    return figure


def _phases_of_epochs(run: RunRecord) -> Figure:
    """Draws a bar for each epoch, or for several epochs together if there are more than
    _MOST_BARS."""
    epochs = _timed_steps_by_epoch(run)
    epochs_per_bar = math.ceil(len(epochs) / _MOST_BARS)
    starts = range(0, len(epochs), epochs_per_bar)
    bars = [
        phase_ms(
            [event for _, events in epochs[start : start + epochs_per_bar] for event in events]
        )
        for start in starts
    ]
    figure, (axes,) = new_figure()
    entries = _stack_bars(bars, axes.bar, "bottom")
    labelled = range(0, len(bars), math.ceil(len(bars) / _MOST_BAR_LABELS))
    axes.set_xticks(labelled, [f"{epochs[starts[bar]][0]}" for bar in labelled])
    axes.set_xlim(-0.6, max(len(bars), 3) - 0.4)
    axes.set_xlabel("epoch" if epochs_per_bar == 1 else f"epoch, {epochs_per_bar} in a bar")
    axes.set_ylabel("ms of one step, mean over ranks")
    legend(figure, entries)
    return figure


def _timed_steps_by_epoch(run: RunRecord) -> list[tuple[int, list[Fields]]]:
    """Returns (epoch, step events with phases); an epoch ends with its evaluation, even if its last
    step reaches into the next epoch."""
    evaluations = run.epoch_events()
    last_steps = [event["step"] for event in evaluations]
    epochs: dict[int, list[Fields]] = {}
    for event in run.step_events():
        if isinstance(event.get("phase_ms"), dict):
            # evaluations; some may lie within an epoch
            before = bisect.bisect_left(last_steps, event["step"])
            ended = [
                one
                for one in evaluations[:before]
                if not number(one, "epochs") < number(one, "epoch")
            ]
            epochs.setdefault(1 + len(ended), []).append(event)
    return list(epochs.items())


def _stack_bars(
    bars: Sequence[dict[str, float]], draw: Callable[..., Any], start: str
) -> list[LegendEntry]:
    """Draws stacked bars by axes.bar or axes.barh, whose argument `start` names the beginning of a
    bar; returns legend entries."""
    others = sorted({name for bar in bars for name in bar} - set(PHASES))
    names = [name for name in [*PHASES, *others] if any(bar.get(name) for bar in bars)]
    entries: list[LegendEntry] = []
    below = [0.0] * len(bars)
    for index, name in enumerate(names):
        colour = PHASES.get(name, COLOURS[index % len(COLOURS)])
        lengths = [bar.get(name, 0.0) for bar in bars]
        edges = {"edgecolor": "#FFFFFF", "linewidth": 0.6}  # for print in grey
        draw(range(len(bars)), lengths, 0.8, **{start: below}, color=colour, **edges)
        below = [low + length for low, length in zip(below, lengths, strict=True)]
        entries.append((name, {"color": colour, "linewidth": 6}))
    return entries


def phase_ms(events: Sequence[Fields]) -> dict[str, float]:
    """Returns milliseconds of one step by phase: the mean of step events, weighted by their numbers
    of steps; empty if none has phases."""
    sums: dict[str, float] = {}
    total_steps = 0.0
    for event in events:
        phases = event.get("phase_ms")
        if not isinstance(phases, dict) or not finite(number(phases, name) for name in phases):
            continue
        steps = first_finite(number(event, "steps"), 1.0)
        total_steps += steps
        for name in phases:
            sums[name] = sums.get(name, 0.0) + steps * first_finite(number(phases, name), 0.0)
    return {name: value / total_steps for name, value in sums.items()} if total_steps else {}
