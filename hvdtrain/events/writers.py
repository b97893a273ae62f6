"""The sinks that write events: TextWriter writes lines for people, with one metric; JsonLinesWriter
writes events.jsonl."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from hvdtrain.core.folder import Folder
from hvdtrain.errors import UserError
from hvdtrain.events.log import Event

OWN_LOOP = "a script's own loop"  # instead of a task, in the event "start"
KEPT = 10_000  # lines that wait in memory while the disk is full; the newest are kept
BURST = 1000  # events of single steps that are written together


class ShownMetric(NamedTuple):
    """The metric that lines show: the task's objective, or its first other metric if that is the
    loss."""

    name: str = "accuracy"  # used in the fields val_<name> and, for the objective, best_<name>
    column: str = "acc"  # its short name
    spec: str = ".4f"  # how its values are written
    objective: str = "accuracy"
    unit: str = "images"  # or samples, or tokens; their rate is shown
    rate: str = "samples_per_s"  # the field that has it
    is_own_loop: bool = False  # a custom loop, whose events only contain the values that it logs


def shown_metric(start: Mapping[str, Any]) -> ShownMetric:
    """Returns the shown metric from the fields of an event "start"; accuracy if it names no
    metrics."""
    metrics = start.get("metrics")
    objective = start.get("objective")
    if not isinstance(metrics, Mapping) or not isinstance(objective, str):
        return ShownMetric()
    unit = "samples" if start.get("unit") == "samples" else "images"
    rate = "samples_per_s"
    if start.get("counts") == "tokens":
        unit = "tokens"
        rate = "tokens_per_s"
    name = (
        objective
        if objective != "loss"
        else next((other for other in metrics if other != "loss"), "loss")
    )
    described = metrics.get(name)
    described = described if isinstance(described, Mapping) else {}
    return ShownMetric(
        str(name),
        str(described.get("column", name)),
        ".4f" if described.get("percent") else ".4g",
        objective,
        unit,
        rate,
        start.get("task") == OWN_LOOP,
    )


class TextOutput(Protocol):
    """An output for the TextWriter's whole lines."""

    def write(self, text: str, /) -> int: ...

    def close(self) -> None: ...


class Pace:
    """Selects the events that the TextWriter needs: events of steps only every_s seconds after the
    last line."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last_line_s = time.monotonic()

    def __call__(self, event: Event) -> bool:
        is_due = time.monotonic() - self._last_line_s >= self._every_s
        has_line = (
            is_due
            if event.kind == "step"
            else event.kind == "epoch" or bool(event.fields.get("lines"))
        )
        if has_line:
            self._last_line_s = time.monotonic()
        return has_line


class TextWriter:
    """Writes a line for each event of an epoch or a step, and the lines that other events contain.
    Writes no control codes, so it suits log files."""

    def __init__(self, out: TextOutput) -> None:
        self._out = out
        self._header_written = False
        self._metric = ShownMetric()
        self._left_out = 0  # lines, not yet reported

    def __call__(self, event: Event) -> None:
        if self._left_out:
            count = self._left_out
            self._left_out = 0
            self.write(
                f"  ({count} line{'s' if count > 1 else ''} left out: nobody read this output)"
            )
        for line in event.fields.get("lines", ()):
            self.write(line)
        if event.kind == "start":
            self._metric = shown_metric(event.fields)
        elif event.kind == "step":
            self.write(_step_line(event.step, event.fields, self._metric))
        elif event.kind == "epoch":
            self._write_epoch(event.fields)

    def write(self, line: str) -> None:
        self._out.write(f"{line}\n")

    def drop(self, event: Event) -> None:
        """Called for a dropped event, from any thread: the number of missing lines is printed
        before the next line."""
        self._left_out += 1 if event.kind == "step" else len(event.fields.get("lines", ()))

    def close(self) -> None:
        self._out.close()

    def _write_epoch(self, fields: dict[str, Any]) -> None:
        if self._metric.is_own_loop:
            self.write(_own_epoch_line(fields, self._metric))
            return
        if not self._header_written:
            self.write(_epoch_header(self._metric))
            self._header_written = True
        self.write(_epoch_line(fields, self._metric))
        if "logged" in fields:  # logged by hooks
            self.write(f"       {_named(fields['logged']).removesuffix(', ')}")
        noise_scale = fields.get("noise_scale", math.nan)
        if math.isfinite(noise_scale):
            self.write(
                f"       noise scale {noise_scale:.0f}: batches far above that many samples save "
                "few steps"
            )


def _own_epoch_line(f: dict[str, Any], metric: ShownMetric) -> str:
    return (
        f"epoch {f['epoch']}: {_named(f['logged'])}{f[metric.rate]:.0f} "
        f"{metric.unit}/s{_rate(f)}, {f['epoch_s']:.1f} s"
    )


def _named(logged: dict[str, float]) -> str:
    return "".join(f"{name} {value:.4g}, " for name, value in logged.items())


def _rate(f: dict[str, Any]) -> str:
    """Returns the learning rate, if known; the rate of a script's optax transformation is
    unknown."""
    return "" if math.isnan(f["lr"]) else f", lr {f['lr']:.4g}"


def _step_line(step: int, f: dict[str, Any], metric: ShownMetric) -> str:
    of = "" if f["of"] is None else f" of {f['of']:.5g}"
    done = f"  step {step}, epoch {f['epochs']:.2f}{of}"
    if metric.is_own_loop:
        return f"{done}: {_named(f['logged'])}{f[metric.rate]:.0f} {metric.unit}/s{_rate(f)}"
    return (
        f"{done}: train loss {f['loss']:.4f}, {_named(f.get('logged', {}))}{f[metric.rate]:.0f} "
        f"{metric.unit}/s, lr {f['lr']:.4g}"
    )


def _epoch_header(metric: ShownMetric) -> str:
    # the task has no other metric
    column = "" if metric.name == "loss" else f"{f'val {metric.column}':>7}  "
    return f"epoch  seconds  epoch s  {metric.unit}/s  train loss  val loss  {column}     lr"


def _epoch_line(f: dict[str, Any], metric: ShownMetric) -> str:
    # an evaluation within an epoch shows the fraction
    epoch = f"{f['epoch']:d}" if f["epochs"] >= f["epoch"] else f"{f['epochs']:.2f}"
    times = (
        f"{epoch:>5}  {f['seconds']:7.1f}  {f['epoch_s']:7.1f}  "
        f"{f[metric.rate]:{len(metric.unit) + 2}.0f}"
    )
    width = max(7, len(f"val {metric.column}"))
    shown = (
        ""
        if metric.name == "loss"
        else f"{f[f'val_{metric.name}']:{metric.spec}}".rjust(width) + "  "
    )
    return f"{times}  {f['train_loss']:10.4f}  {f['val_loss']:8.4f}  {shown}{f['lr']:7.4g}"


class Owner(Protocol):
    """The owner of a file's folder."""

    def open(self, path: Path, /) -> Folder:
        """Opens the folder. Raises an error if another folder has its path, or if another job owns
        it; OSError if it cannot be opened."""

    def refuse(self, error: OSError) -> None:
        """Raises after a permanent error: a folder that can no longer be written."""


class JsonLinesWriter:
    """Appends one JSON object per line, before the call returns: {"time", "kind", "step", and the
    event's fields}.

    While the disk is full, the newest KEPT lines wait for the next call: training continues, and no
    partial line is written. Events of single steps (step_times) are written in bursts, at the
    latest before the next event of another kind. An error of the owner is raised once; after that
    nothing is written.
    """

    def __init__(self, path: Path, owner: Owner | None = None) -> None:
        self._path = path
        self._owner = owner
        self._lost = False
        self._waiting = deque[str](maxlen=KEPT)
        self._since_write = 0  # lines since the last attempt to write

    def __call__(self, event: Event) -> None:
        self._waiting.append(line_of(event))
        self._since_write += 1
        if event.kind == "step_times" and self._since_write < BURST:
            return
        self._since_write = 0
        if not self._lost:
            self._write()

    def _write(self) -> None:
        """Writes the waiting lines. Raises the owner's errors."""
        self._lost = True
        try:
            with (self._owner.open if self._owner else Folder.open)(self._path.parent) as folder:
                _append(folder, self._path.name, "".join(self._waiting).encode())
            self._waiting.clear()
        except OSError as error:
            if self._owner:
                self._owner.refuse(error)
        self._lost = False


def append_event(run: Path, event: Event) -> None:
    """Adds an event to the events.jsonl of another job's run. Raises OSError if the file does not
    exist or cannot be written."""
    data = line_of(event).encode()
    with Folder.open(run) as folder:
        folder.open_file("events.jsonl").close()
        with folder.append("events.jsonl") as file:
            if file.write(data) < len(data):
                # a single write, because the job may write, too; readers skip a truncated line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def line_of(event: Event) -> str:
    """Returns the line of events.jsonl for an event."""
    return (
        to_json(
            {"time": round(event.time, 3), "kind": event.kind, "step": event.step, **event.fields}
        )
        + "\n"
    )


def to_json(fields: dict[str, Any]) -> str:
    """Returns a JSON object on one line, with null for numbers that are not finite."""
    return json.dumps(finite(fields), allow_nan=False)


def _append(folder: Folder, name: str, data: bytes) -> None:
    """Appends all of the data. If that fails, the file is unchanged and OSError is raised."""
    with folder.append(name) as file:  # 50 us; no open file is left when a job is killed
        before = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(before)
            raise


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by null, inside lists and mappings too."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class OutputStream(io.TextIOBase):
    """An output that bypasses Python's buffer. A thread that waits for the reader of a full pipe
    then holds no lock that the process needs to exit.

    Output that a full disk or a closed terminal does not accept is lost. Raises UserError if the
    reader of a pipe has exited. If `out` is not a file, as in a notebook, raises its errors.
    """

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._number: int | None = None
        with contextlib.suppress(OSError):  # in memory
            self._number = os.dup(out.fileno()) if type(out) is io.TextIOWrapper else None
        self._encoding = getattr(out, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        # letters that the encoding lacks as \\u65e5
        data = text.encode(self._encoding, "backslashreplace")
        try:
            if self._number is None:
                self._out.write(data.decode(self._encoding))
                self._out.flush()
            else:
                _write_all(self._number, data)
        except BrokenPipeError:
            raise UserError("its reader is gone") from None
        except OSError:
            pass
        return len(text)

    def has(self, letters: str) -> bool:
        """Whether the encoding supports these letters."""
        with contextlib.suppress(UnicodeEncodeError):
            return bool(letters.encode(self._encoding))
        return False

    def close(self) -> None:
        if self._number is not None:
            os.close(self._number)
            self._number = None
        super().close()


def _write_all(number: int, data: bytes) -> None:
    while data:
        data = data[os.write(number, data) :]
