"""A display that moves: bars of the epoch and of the job, and the newest figures; the lines of a log file scroll by above it."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import textwrap
import time
from typing import IO, Any, cast

from rich.console import Console as Terminal
from rich.console import RenderableType
from rich.live import Live as Region
from rich.text import Text

from hvdtrain.events.log import Event
from hvdtrain.events.writers import Console, writable

PER_S = 1.0  # drawings a second, two milliseconds each
CELL = 26  # columns of a terminal, for one figure
LONGEST_BAR = 60
INDENT = " " * 8  # of the header's second lines


class Live:
    """A sink. It never hides the cursor, so a job that is killed leaves a terminal as it was."""

    def __init__(self, out: IO[str]) -> None:
        self._terminal = Terminal(file=cast("IO[str]", _Mute(out)), force_terminal=True, highlight=False)
        self._bar = "━─" if writable("━─", out) == "━─" else "#-"  # what is done, and what is not
        self._fields: dict[str, Any] = {}  # the newest of each name
        self._began: tuple[float, float] | None = None  # share of the job and time, at the first figures
        self._share = 0.0
        self._step = 0
        self._whole: tuple[int | None, int] = (None, 1)  # max_steps, training samples
        self._region = Region(
            get_renderable=self._view, console=self._terminal, refresh_per_second=PER_S, transient=True, redirect_stderr=sys.stderr.isatty()
        )
        self._lines = Console(cast("IO[str]", _Above(self._terminal)), math.inf)

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            self._whole = (event.fields.get("max_steps"), event.fields.get("samples", 1))
            self._region.start(refresh=False)
            self._terminal.show_cursor(True)
        if event.kind in ("end", "stop", "failed"):
            self._region.stop()
        self._lines(event)
        if event.kind in ("step", "epoch"):
            self._take(event)

    def close(self, timeout_s: float) -> None:
        self._region.stop()

    def _take(self, event: Event) -> None:
        self._fields |= {key: value for key, value in event.fields.items() if value is not None}
        self._step = event.step
        most = self._whole[0]
        done = [self._fields.get("epochs", 0.0) / max(1, self._fields.get("of", 1)), *([event.step / most] if most else [])]
        self._share = min(1.0, max(done))
        if self._began is None:
            self._began = self._share, time.monotonic()

    def _view(self) -> RenderableType:
        """One text: tables would take four times as long to draw."""
        if self._began is None:
            return Text("starting: the first figures come with log.every_steps\n", style="dim")
        columns = max(1, self._terminal.width // CELL)
        view = Text(no_wrap=True, overflow="crop")
        for row in self._bars(self._terminal.width):
            view.append_tokens(row)
        for place, (name, value) in enumerate(self._figures(), start=1):
            end = "\n" if place % columns == 0 else " " * max(1, CELL - len(name) - len(value) - 1)
            view.append_tokens([(f"{name} ", "dim"), (value + end, "bold")])
        if slow := self._slowest():
            view.append_tokens([("\nslowest ", "dim"), (slow, "bold")])
        return view.append("\n")  # mpirun keeps back a last line without an end

    def _bars(self, width: int) -> list[list[tuple[str, str]]]:
        """The epoch's and the job's."""
        epochs, of = self._fields.get("epochs", 0.0), self._fields.get("of", 1)
        within = epochs - math.floor(epochs) if epochs < of else 1.0
        steps = max(1, round(self._whole[1] / max(1, self._fields.get("batch", 1))))
        heads = f"epoch {min(of, math.floor(epochs) + 1)} of {of} ", f"job   step {self._step} "
        longest, room = max(map(len, heads)), max(10, min(LONGEST_BAR, width - 40))
        ends = f" {round(within * steps)} of {steps} steps\n", f" {self._share:.0%}, {self._left()} left\n"
        rows = []
        for head, share, end in zip(heads, (within, self._share), ends, strict=True):
            done = round(share * room)
            rows.append(
                [(head.ljust(longest), ""), (self._bar[0] * done, "magenta"), (self._bar[1] * (room - done), "bright_black"), (end, "")]
            )
        return rows

    def _left(self) -> str:
        assert self._began is not None
        share, began_s = self._began
        if self._share <= share:
            return "?"
        return duration((1.0 - self._share) * (time.monotonic() - began_s) / (self._share - share))

    def _figures(self) -> list[tuple[str, str]]:
        f = self._fields
        phases = f.get("phase_ms", {})
        step_ms = sum(phases.values())
        rows = [
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
        return [row for row in rows if row[1]]

    def _slowest(self) -> str:
        """The rank whose own work takes a tenth longer than the median's."""
        least, middle, most = self._fields.get("work_ms", (0.0, 0.0, 0.0))
        if most <= 1.1 * middle or least == most:
            return ""
        return f"rank {self._fields['slowest_rank']} on {self._fields['slowest_host']}, {most / middle:.2f} x the median"


class _Mute:
    """A terminal that may go away: what is written to it then is lost, and the job goes on."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._out.write(writable(text, self._out))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._out.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


class _Above(io.TextIOBase):
    """What a Console writes to: lines over the region."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def write(self, text: str) -> int:
        if text.strip("\n"):
            lines = textwrap.wrap(text.rstrip("\n"), self._terminal.width, subsequent_indent=INDENT, replace_whitespace=False)
            self._terminal.print(Text("\n".join(lines)), soft_wrap=True)
        return len(text)


def duration(seconds: float) -> str:
    """3:07, 2:03:07, or 1 day 2:03:07."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole % 86400 // 3600, whole % 3600 // 60
    clock = f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours or days else f"{minutes}:{whole % 60:02d}"
    return f"{days} day{'s' * (days > 1)} {clock}" if days else clock
