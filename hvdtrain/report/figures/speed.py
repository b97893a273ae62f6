"""The figures of speed: images a second, where a step's time went, each rank's own work, memory, power."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.report.figures.style import COLOURS, GREY, HEIGHT, clock, from_zero, legend, line, look, new, plain, runs
from hvdtrain.report.run import Fields, Record, number
from hvdtrain.report.summary import finite, first, job_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = {  # in the order of a step; "communication" is what is waited for gradients
    "data": "#56B4E9", "forward": "#0072B2", "backward": "#009E73", "compute": "#009E73",
    "communication": "#D55E00", "update": "#E69F00", "other": "#999999",
}  # fmt: skip
_MOST_BARS = 60


def throughput(records: Sequence[Record], labels: Sequence[str]) -> Figure | None:
    """Images a second between meetings of the ranks."""
    figure, (axes,) = new()
    step_look: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.8}
    if not _over_time([axes], records, [(0, "images_per_s", "steps", step_look)]):
        return None
    axes.set_ylabel("images/s")
    axes.yaxis.set_major_formatter("{x:,g}")
    legend(figure, runs(labels))
    return figure


def memory(records: Sequence[Record], labels: Sequence[str]) -> Figure | None:
    """Of the largest rank."""
    figure, (axes,) = new()
    alone = len(records) == 1
    gpu = {"linewidth": 1.6, "linestyle": (0, (1, 1.2))} | ({"color": COLOURS[1]} if alone else {})
    names = [(0, "memory_mb", "steps", {"linewidth": 1.6, "linestyle": "-"}), (0, "gpu_memory_mb", "steps", gpu)]
    if not _over_time([axes], records, names):
        return None
    axes.set_ylabel("MB, largest rank")
    axes.yaxis.set_major_formatter("{x:,g}")
    grey: dict[str, Any] = {"color": GREY}
    kinds = [("host memory", (grey if not alone else {"color": COLOURS[0]})), ("GPU memory, peak", grey | gpu)]
    has = [any(finite(number(event, name) for record in records for event in record.steps())) for _, name, _, _ in names]
    legend(figure, [*runs(labels, linestyle="-"), *(kind for kind, there in zip(kinds, has, strict=True) if there)])
    return figure


def power(records: Sequence[Record], labels: Sequence[str]) -> Figure | None:
    """Watts between meetings, and joules per image of each epoch: of what was measured."""
    names = [("watts", "steps", "W"), ("joules_per_image", "epochs", "J per image")]
    events: dict[str, Callable[[Record], list[Fields]]] = {"steps": Record.steps, "epochs": Record.epochs}
    there = [part for part in names if finite(number(event, part[0]) for record in records for event in events[part[1]](record))]
    if not there:
        return None
    figure, places = new(len(there), sharex=True, height=HEIGHT + 0.8 * (len(there) - 1))
    kind: dict[str, Any] = {"linewidth": 1.4}
    _over_time(places, records, [(row, name, of, kind) for row, (name, of, _) in enumerate(there)])
    for axes, (_, _, unit) in zip(places, there, strict=True):
        axes.set_ylabel(unit)
        axes.yaxis.set_major_formatter("{x:,g}")
    figure.align_ylabels()
    legend(figure, runs(labels))
    return figure


def _over_time(places: Sequence[Axes], records: Sequence[Record], names: Sequence[tuple[int, str, str, dict[str, Any]]]) -> bool:
    """(place, field, of steps or epochs, look) over the job's time, from 0; whether anything was drawn."""
    unit_s, unit = clock(max(first(job_seconds(record), 0.0) for record in records))
    shown = False
    for index, record in enumerate(records):
        for place, name, of, kind in names:
            events = record.steps() if of == "steps" else record.epochs()
            times = [record.seconds(event) / unit_s for event in events]
            shown |= line(places[place], times, [number(event, name) for event in events], **look(index) | kind)
    places[-1].set_xlabel(f"time of the job ({unit})")
    places[-1].set_xlim(left=0)
    for axes in places:
        from_zero(axes)
    return shown


def phases(records: Sequence[Record], labels: Sequence[str]) -> Figure | None:
    """Milliseconds of one step: stacked over the epochs of one run, or one bar for each of several."""
    told = [(label, record) for label, record in zip(labels, records, strict=True) if phase_ms(record.steps())]
    if not told:
        return None
    if len(records) == 1:
        return _phases_of_epochs(told[0][1])
    bars = [phase_ms(record.steps()) for _, record in told]
    figure, (axes,) = new(height=1.4 + 0.34 * len(bars))
    names = _stack(axes, bars, axes.barh, "left")
    axes.set_yticks(range(len(bars)), [plain(label) for label, _ in told], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlabel("ms of one step, mean over ranks")
    legend(figure, [(name, {"color": colour, "linewidth": 6}) for name, colour in names])
    return figure


def _phases_of_epochs(record: Record) -> Figure:
    """By epochs as they were evaluated: the last step of one may reach into the next."""
    epochs: dict[int, list[Fields]] = {}
    ends = [event["step"] for event in record.epochs()]
    for event in record.steps():
        if isinstance(event.get("phase_ms"), dict):
            epochs.setdefault(1 + bisect.bisect_left(ends, event["step"]), []).append(event)
    width = -(-len(epochs) // _MOST_BARS)
    parts = [list(epochs.items())[place : place + width] for place in range(0, len(epochs), width)]
    bars = [phase_ms([event for _, events in part for event in events]) for part in parts]
    figure, (axes,) = new()
    names = _stack(axes, bars, axes.bar, "bottom")
    shown = range(0, len(bars), -(-len(bars) // 12))
    axes.set_xticks(shown, [f"{parts[place][0][0]}" for place in shown])
    axes.set_xlim(-0.6, max(len(bars), 3) - 0.4)
    axes.set_xlabel("epoch" if width == 1 else f"epoch, {width} in a bar")
    axes.set_ylabel("ms of one step, mean over ranks")
    legend(figure, [(name, {"color": colour, "linewidth": 6}) for name, colour in names])
    return figure


def _stack(axes: Axes, bars: Sequence[dict[str, float]], draw: Callable[..., Any], base: str) -> list[tuple[str, str]]:
    """(name, colour) of each phase, in their order."""
    known = [*PHASES, *sorted({name for bar in bars for name in bar} - set(PHASES))]
    names = [name for name in known if any(bar.get(name) for bar in bars)]
    colours = [(name, PHASES.get(name, COLOURS[place % len(COLOURS)])) for place, name in enumerate(names)]
    under = [0.0] * len(bars)
    for name, colour in colours:
        lengths = [bar.get(name, 0.0) for bar in bars]
        draw(range(len(bars)), lengths, 0.8, **{base: under}, color=colour)
        under = [low + length for low, length in zip(under, lengths, strict=True)]
    return colours


def phase_ms(events: Sequence[Fields]) -> dict[str, float]:
    """Of one step, the mean over windows of different lengths."""
    sums: dict[str, float] = {}
    steps = 0.0
    for event in events:
        if isinstance(found := event.get("phase_ms"), dict) and finite(number(found, name) for name in found):
            count = first(number(event, "steps"), 1.0)
            steps += count
            for name in found:
                sums[name] = sums.get(name, 0.0) + count * first(number(found, name), 0.0)
    return {name: value / steps for name, value in sums.items()} if steps else {}
