"""A display that updates in place on a terminal: progress bars of epoch and job, and the newest metrics; lines scroll above it."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import textwrap
import time
from typing import IO, Any, NamedTuple, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hvdtrain.events.log import Event
from hvdtrain.events.writers import TextWriter, encodable

REFRESH_PER_S = 1.0  # a refresh takes two milliseconds
CELL_WIDTH = 26  # columns of a terminal, for one metric
LONGEST_BAR = 60
INDENT = " " * 8  # of a line that goes on under its first word, as in the header
SLOW = 1.1  # times the median of the ranks' own work; a slower rank is named


class _Progress(NamedTuple):
    share: float  # of the job that is done
    time_s: float  # of time.monotonic()


class ProgressDisplay:
    """A sink. It never hides the cursor, so a job that is killed leaves the terminal as it was."""

    def __init__(self, out: IO[str]) -> None:
        self._console = Console(file=cast("IO[str]", _LossyStream(out)), force_terminal=True, highlight=False)
        has_box_letters = encodable("━─", out) == "━─"
        self._done_letter, self._rest_letter = "━─" if has_box_letters else "#-"
        self._max_steps: int | None = None
        self._train_samples = 1
        self._fields: dict[str, Any] = {}  # name of a field -> its newest value
        self._step = 0
        self._first: _Progress | None = None  # at the first step event
        self._share = 0.0  # of the job that is done
        self._live = Live(
            get_renderable=lambda: self.render(self._console.width),
            console=self._console,
            refresh_per_second=REFRESH_PER_S,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._lines = TextWriter(cast("IO[str]", _LinesAbove(self._console)), math.inf)

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            self._max_steps = event.fields.get("max_steps")
            self._train_samples = event.fields.get("samples", 1)
            self._live.start(refresh=False)
            self._console.show_cursor(True)
        if event.kind in ("end", "stop", "failed"):
            self._live.stop()
        self._lines(event)
        if event.kind in ("step", "epoch"):
            self._update(event)

    def close(self, timeout_s: float) -> None:
        self._live.stop()

    def render(self, width: int) -> Text:
        """What the display shows, on a terminal of so many columns. One Text: tables take four times as long."""
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
        return view.append("\n")  # mpirun withholds a last line without a newline

    def _update(self, event: Event) -> None:
        self._fields |= {key: value for key, value in event.fields.items() if value is not None}
        self._step = event.step
        share = self._fields.get("epochs", 0.0) / max(1, self._fields.get("of", 1))
        if self._max_steps:
            share = max(share, event.step / self._max_steps)
        self._share = min(1.0, share)
        if self._first is None:
            self._first = _Progress(self._share, time.monotonic())

    def _bars(self, width: int) -> list[list[tuple[str, str]]]:
        """The epoch's and the job's, each as (text, style) parts."""
        done, epochs = self._fields.get("epochs", 0.0), self._fields.get("of", 1)
        epoch_share = done - math.floor(done) if done < epochs else 1.0
        epoch_steps = max(1, round(self._train_samples / max(1, self._fields.get("batch", 1))))
        epoch_label = f"epoch {min(epochs, math.floor(done) + 1)} of {epochs} "
        job_label = f"job   step {self._step} "
        label_width = max(len(epoch_label), len(job_label))
        bar_width = max(10, min(LONGEST_BAR, width - 40))
        return [
            self._bar(
                epoch_label.ljust(label_width), epoch_share, bar_width, f" {round(epoch_share * epoch_steps)} of {epoch_steps} steps\n"
            ),
            self._bar(job_label.ljust(label_width), self._share, bar_width, f" {self._share:.0%}, {self._time_left()} left\n"),
        ]

    def _bar(self, label: str, share: float, width: int, end: str) -> list[tuple[str, str]]:
        done = round(share * width)
        return [(label, ""), (self._done_letter * done, "magenta"), (self._rest_letter * (width - done), "bright_black"), (end, "")]

    def _time_left(self) -> str:
        assert self._first is not None
        if self._share <= self._first.share:
            return "?"
        seconds_per_job = (time.monotonic() - self._first.time_s) / (self._share - self._first.share)
        return duration((1.0 - self._share) * seconds_per_job)

    def _metrics(self) -> list[tuple[str, str]]:
        """(name, value) of those that are known."""
        f = self._fields
        phases = f.get("phase_ms", {})
        step_ms = sum(phases.values())
        metrics = [
            ("images/s", f"{f['images_per_s']:,.0f}" if "images_per_s" in f else ""),
            ("loss", f"{f['loss']:.4f}" if "loss" in f else ""),
            ("accuracy", f"{f['accuracy']:.4f}" if "accuracy" in f else ""),
            ("val acc", f"{f['val_accuracy']:.4f}" if "val_accuracy" in f else ""),
            ("best", f"{f['best_accuracy']:.4f}" if "best_accuracy" in f else ""),
            ("lr", f"{f['lr']:.4g}" if "lr" in f else ""),
            ("batch", f"{f['batch']:,}" if "batch" in f else ""),
            ("step", f"{step_ms:.1f} ms" if step_ms else ""),
            ("waiting for data", f"{phases.get('data', 0.0) / step_ms:.1%}" if step_ms else ""),
            ("for gradients", f"{phases['communication'] / step_ms:.1%}" if step_ms and "communication" in phases else ""),
            ("memory", f"{f['memory_mb'] / 1e3:.2f} GB" if "memory_mb" in f else ""),
            ("GPU memory", f"{f['gpu_memory_mb'] / 1e3:.2f} GB" if "gpu_memory_mb" in f else ""),
            ("power", f"{f['watts']:,.0f} W" if "watts" in f else ""),
        ]
        return [(name, value) for name, value in metrics if value]

    def _slowest_rank(self) -> str:
        """Empty unless its own work takes a tenth longer than the median of the ranks."""
        least_ms, median_ms, most_ms = self._fields.get("work_ms", (0.0, 0.0, 0.0))
        if most_ms <= SLOW * median_ms or least_ms == most_ms:
            return ""
        return f"rank {self._fields['slowest_rank']} on {self._fields['slowest_host']}, {most_ms / median_ms:.2f} x the median"


class _LossyStream:
    """A terminal's stream whose output is lost once the terminal is gone, while the job goes on."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._out.write(encodable(text, self._out))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._out.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


class _LinesAbove(io.TextIOBase):
    """The stream of the TextWriter: its lines scroll above the display."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        if text.strip("\n"):
            lines = textwrap.wrap(text.rstrip("\n"), self._console.width, subsequent_indent=INDENT, replace_whitespace=False)
            self._console.print(Text("\n".join(lines)), soft_wrap=True)
        return len(text)


def duration(seconds: float) -> str:
    """3:07, 2:03:07, or 1 day 2:03:07."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02d}:{rest_s:02d}" if hours or days else f"{minutes}:{rest_s:02d}"
    return f"{days} day{'s' * (days > 1)} {clock}" if days else clock
