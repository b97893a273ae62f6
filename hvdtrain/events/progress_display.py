"""A display that updates in place on a terminal: progress bars of epoch and job, and the newest
metrics; lines scroll above it."""

from __future__ import annotations

import math
import os
import textwrap
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Any, NamedTuple, cast

from rich.console import Console, ConsoleDimensions
from rich.control import Control
from rich.live import Live
from rich.text import Text

from hvdtrain.events.log import Event
from hvdtrain.events.writers import OutputStream, ShownMetric, TextWriter, shown_metric

MOST_LINES = 200  # lines above the display when the screen is redrawn
CELL_WIDTH = 26  # columns of the terminal for one metric
LONGEST_BAR = 60
INDENT = " " * 8  # indents a continued line under its first word, as in the header
SLOW = 1.1  # times the median of the ranks' own work; a slower rank is named


class _Progress(NamedTuple):
    share: float  # completed share of the job
    time_s: float  # of time.monotonic()


class ProgressDisplay:
    """The display, run by a BackgroundSink with tick(). It never hides the cursor, so a killed job
    leaves the terminal as it was.

    size: returns the terminal's current columns and lines.
    """

    def __init__(self, out: OutputStream, size: Callable[[], os.terminal_size]) -> None:
        self._out = out
        self._size = size
        self._drawn_size = size()
        self._console = Console(
            file=cast("IO[str]", out),
            force_terminal=True,
            highlight=False,
            width=self._drawn_size.columns,
            height=self._drawn_size.lines,
        )
        self._done_letter, self._rest_letter = "━─" if out.has("━─") else "#-"
        self._recent = deque[str](maxlen=MOST_LINES)  # above the display
        self._max_steps: int | None = None
        self._max_s: float | None = None
        self._train_samples = 1
        self._metric = ShownMetric()
        self._coordinates: list[
            list[int]
        ] = []  # [stage, data, tensor] of each rank; empty if every rank has a complete model
        self._fields: dict[str, Any] = {}  # name of a field -> its newest value
        self._step = 0
        self._first: _Progress | None = None  # at the first step event
        self._share = 0.0  # completed share of the job
        self._live = Live(
            get_renderable=lambda: self.render(self._console.width),
            console=self._console,
            auto_refresh=False,  # tick() does it
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._lines = TextWriter(_LinesAbove(self._print_above))

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            self._metric = shown_metric(event.fields)
            self._max_steps = event.fields.get("max_steps")
            self._max_s = event.fields.get("max_seconds")
            self._train_samples = event.fields.get("samples", 1)
            self._coordinates = event.fields.get("coordinates_of_rank", [])
            self._start()
        if event.kind in ("end", "stop", "failed"):
            self._live.stop()
        if event.kind != "step":
            self._lines(event)
        if event.kind in ("step", "epoch"):
            self._update(event)

    def drop(self, event: Event) -> None:
        """Called for a dropped event; only lines that the job printed are missed."""
        if event.kind != "step":
            self._lines.drop(event)

    def tick(self) -> None:
        """Redraws the display, or the whole screen if the terminal's size has changed."""
        if not self._live.is_started:
            return
        if self._size() != self._drawn_size:
            self._redraw()
        self._live.refresh()

    def close(self) -> None:
        self._live.stop()
        self._out.close()

    def _start(self) -> None:
        self._live.start(refresh=False)
        self._console.show_cursor(True)

    def _print_above(self, line: str) -> None:
        self._recent.append(line)
        self._console.print(Text("\n".join(self._wrapped(line))), soft_wrap=True)

    def _wrapped(self, line: str) -> list[str]:
        return textwrap.wrap(
            line, self._console.width, subsequent_indent=INDENT, replace_whitespace=False
        )

    def _redraw(self) -> None:
        """Scrolls the screen away and starts again: each terminal moves its content in its own way
        when its size changes."""
        self._live.stop()
        self._drawn_size = self._size()
        self._console.size = ConsoleDimensions(*self._drawn_size)
        self._out.write("\n" * self._drawn_size.lines)
        self._console.control(Control.home(), Control.clear())
        shown = self.render(self._drawn_size.columns).plain.count("\n") + 1
        above = [part for line in self._recent for part in self._wrapped(line)][
            -max(1, self._drawn_size.lines - shown) :
        ]
        self._console.print(Text("\n".join(above)), soft_wrap=True)
        self._start()

    def render(self, width: int) -> Text:
        """Returns the display's content for a terminal of `width` columns. A single Text: tables
        take four times as long."""
        if self._first is None:
            return Text("starting: the first metrics come with log.every_steps\n", style="dim")
        view = Text(no_wrap=True, overflow="crop")
        for bar in self._bars(width):
            view.append_tokens(bar)
        columns = max(1, width // CELL_WIDTH)
        for number, (name, value) in enumerate(self._metrics(), start=1):
            padding = " " * max(1, CELL_WIDTH - len(name) - len(value) - 1)
            end = "\n" if number % columns == 0 else padding
            view.append_tokens([(f"{name} ", "dim"), (value + end, "bold")])
        slowest = self._slowest_rank()
        if slowest:
            view.append_tokens([("\nslowest ", "dim"), (slowest, "bold")])
        stages = self._stages()
        if stages:
            view.append_tokens([("\nstages  ", "dim"), (stages, "bold")])
        return view.append("\n")  # mpirun withholds a last line without a newline

    def _update(self, event: Event) -> None:
        self._fields |= {key: value for key, value in event.fields.items() if value is not None}
        self._step = event.step
        share = self._fields.get("epochs", 0.0) / self._fields.get("of", math.inf)
        if self._max_steps:
            share = max(share, event.step / self._max_steps)
        if self._max_s:
            share = max(share, self._fields.get("seconds", 0.0) / self._max_s)
        self._share = min(1.0, share)
        if self._first is None:
            self._first = _Progress(self._share, time.monotonic())

    def _bars(self, width: int) -> list[list[tuple[str, str]]]:
        """Returns the bars of the epoch and the job, each as (text, style) parts."""
        done = self._fields.get("epochs", 0.0)
        epochs = self._fields.get("of", math.inf)
        epoch_share = done - math.floor(done) if done < epochs else 1.0
        epoch_steps = max(1, round(self._train_samples / max(1, self._fields.get("batch", 1))))
        of = f" of {epochs:.5g}" if epochs < math.inf else ""
        epoch_label = (
            f"epoch {min(math.ceil(epochs) if of else math.inf, math.floor(done) + 1)}{of} "
        )
        job_label = f"job   step {self._step} "
        label_width = max(len(epoch_label), len(job_label))
        bar_width = max(10, min(LONGEST_BAR, width - 40))
        return [
            self._bar(
                epoch_label.ljust(label_width),
                epoch_share,
                bar_width,
                f" {round(epoch_share * epoch_steps)} of {epoch_steps} steps\n",
            ),
            self._bar(
                job_label.ljust(label_width),
                self._share,
                bar_width,
                f" {self._share:.0%}, {self._time_left()} left\n",
            ),
        ]

    def _bar(self, label: str, share: float, width: int, end: str) -> list[tuple[str, str]]:
        done = round(share * width)
        return [
            (label, ""),
            (self._done_letter * done, "magenta"),
            (self._rest_letter * (width - done), "bright_black"),
            (end, ""),
        ]

    def _time_left(self) -> str:
        assert self._first is not None
        if self._share <= self._first.share:
            return "?"
        seconds_per_job = (time.monotonic() - self._first.time_s) / (
            self._share - self._first.share
        )
        return duration((1.0 - self._share) * seconds_per_job)

    def _metrics(self) -> list[tuple[str, str]]:
        """Returns (name, value) of each known metric."""
        f = self._fields
        phases = f.get("phase_ms", {})
        step_ms = sum(phases.values())
        name, column, spec, objective, unit, rate, _ = self._metric
        metrics = [
            (f"{unit}/s", f"{f[rate]:,.0f}" if rate in f else ""),
            ("loss", f"{f['loss']:.4f}" if "loss" in f else ""),
            (name, f"{f[name]:{spec}}" if name in f else ""),
            (f"val {column}", f"{f[f'val_{name}']:{spec}}" if f"val_{name}" in f else ""),
            ("best", f"{f[f'best_{objective}']:{spec}}" if f"best_{objective}" in f else ""),
            ("lr", f"{f['lr']:.4g}" if "lr" in f else ""),
            ("batch", f"{f['batch']:,}" if "batch" in f else ""),
            ("step", f"{step_ms:.1f} ms" if step_ms else ""),
            ("waiting for data", f"{phases.get('data', 0.0) / step_ms:.1%}" if step_ms else ""),
            (
                "for ranks" if self._coordinates else "for gradients",
                f"{phases['communication'] / step_ms:.1%}"
                if step_ms and "communication" in phases
                else "",
            ),
            ("memory", f"{f['memory_mb'] / 1e3:.2f} GB" if "memory_mb" in f else ""),
            ("GPU memory", f"{f['gpu_memory_mb'] / 1e3:.2f} GB" if "gpu_memory_mb" in f else ""),
            ("GPU", f"{f['gpu_percent']:.0f} % busy" if "gpu_percent" in f else ""),
            (
                "of each device",
                f"{f['device_tflops']:.3g} TFLOP/s"
                + (f", {f['mfu']:.1%} MFU" if "mfu" in f else "")
                if "device_tflops" in f
                else "",
            ),
            ("power", f"{f['watts']:,.0f} W" if "watts" in f else ""),
        ]
        return [(name, value) for name, value in metrics if value]

    def _slowest_rank(self) -> str:
        """Returns the slowest rank; empty unless its own work takes a tenth longer than the median
        of the ranks."""
        least_ms, median_ms, most_ms = self._fields.get("work_ms", (0.0, 0.0, 0.0))
        if most_ms <= SLOW * median_ms or least_ms == most_ms:
            return ""
        rank = self._fields["slowest_rank"]
        stage = (
            f", of stage {self._coordinates[rank][0]}" if "stage_work_ms" in self._fields else ""
        )
        return (
            f"rank {rank} on {self._fields['slowest_host']}, {most_ms / median_ms:.2f} x the "
            f"median{stage}"
        )

    def _stages(self) -> str:
        """Returns a pipeline's line, shorter than 80 columns: the stage with the most work, the
        stage that waits most, and the average wait."""
        bubble = self._fields.get("bubble", [])
        work_ms = self._fields.get("stage_work_ms", [])
        if not bubble or len(bubble) != len(self._coordinates):
            return ""
        of_stages = [
            [
                share
                for share, (stage, *_) in zip(bubble, self._coordinates, strict=True)
                if stage == one
            ]
            for one in range(len(work_ms))
        ]
        waits = [sum(shares) / len(shares) for shares in of_stages]
        most = (
            f"{max(range(len(waits)), key=waits.__getitem__)} waits most, {max(waits):.0%}; "
            if waits
            else ""
        )
        slowest = (
            f"{self._fields['slowest_stage']} is slowest, {max(work_ms):.1f} ms; "
            if work_ms
            else ""
        )
        by_schedule = (
            f" (schedule {self._fields['bubble_predicted']:.0%})"
            if "bubble_predicted" in self._fields
            else ""
        )
        return f"{slowest}{most}bubble {sum(bubble) / len(bubble):.0%}{by_schedule}"


class _LinesAbove:
    """The output of the TextWriter: lines scroll above the display."""

    def __init__(self, print_above: Callable[[str], None]) -> None:
        self._print_above = print_above

    def write(self, text: str) -> int:
        self._print_above(text.rstrip("\n"))
        return len(text)

    def close(self) -> None:
        """Does nothing: the display closes the stream."""


def duration(seconds: float) -> str:
    """Formats seconds as 3:07, 2:03:07, or 1 day 2:03:07."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02d}:{rest_s:02d}" if hours or days else f"{minutes}:{rest_s:02d}"
    return f"{days} day{'s' if days > 1 else ''} {clock}" if days else clock
