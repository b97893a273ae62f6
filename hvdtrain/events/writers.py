"""The sinks that write events: TextWriter as plain lines for people, JsonLinesWriter as events.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

from hvdtrain.events.log import Event

KEPT = 10_000  # lines that wait in memory while the disk is full; the newest are kept
BURST = 1000  # events of single steps that are written together

_EPOCH_HEADER = "epoch  seconds  epoch s  images/s  train loss  val loss  val acc       lr"


class TextWriter:
    """Writes a line for each epoch, and inside an epoch a line every `every_s` seconds at most. No control codes: fit for a log file.

    Lines are lost while the disk is full. Raises BrokenPipeError where the reader of the output has gone away.
    """

    def __init__(self, out: IO[str], every_s: float) -> None:
        self._out = out
        self._every_s = every_s
        self._last_line_s = time.monotonic()
        self._header_written = False

    def __call__(self, event: Event) -> None:
        for line in event.fields.get("lines", ()):
            self._write(line)
        if event.kind == "step" and time.monotonic() - self._last_line_s >= self._every_s:
            self._write(_step_line(event.step, event.fields))
        elif event.kind == "epoch":
            self._write_epoch(event.fields)

    def _write_epoch(self, fields: dict[str, Any]) -> None:
        if not self._header_written:
            self._write(_EPOCH_HEADER)
            self._header_written = True
        self._write(_epoch_line(fields))
        noise_scale = fields.get("noise_scale", math.nan)
        if math.isfinite(noise_scale):
            self._write(f"       noise scale {noise_scale:.0f}: batches far above that many samples save few steps")

    def _write(self, line: str) -> None:
        self._last_line_s = time.monotonic()
        try:
            print(encodable(line, self._out), file=self._out, flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            pass  # a file on a full disk: training goes on


def encodable(line: str, out: IO[str]) -> str:
    """The line, with letters that the stream's encoding lacks written as \\u65e5."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        return line.encode(encoding, "backslashreplace").decode(encoding)
    return line


def _step_line(step: int, f: dict[str, Any]) -> str:
    done = f"  step {step}, epoch {f['epochs']:.2f} of {f['of']}"
    return f"{done}: train loss {f['loss']:.4f}, {f['images_per_s']:.0f} images/s, lr {f['lr']:.4g}"


def _epoch_line(f: dict[str, Any]) -> str:
    times = f"{f['epoch']:5d}  {f['seconds']:7.1f}  {f['epoch_s']:7.1f}  {f['images_per_s']:8.0f}"
    return f"{times}  {f['train_loss']:10.4f}  {f['val_loss']:8.4f}  {f['val_accuracy']:7.4f}  {f['lr']:7.4g}"


class JsonLinesWriter:
    """Appends one JSON object a line, before the call returns: {"time", "kind", "step", and the event's fields}.

    While the disk is full the newest KEPT lines wait for the next call: training goes on, and no line is written in part.
    Events of single steps (step_times) are written in bursts, at the latest before the next event of another kind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = deque[str](maxlen=KEPT)
        self._since_write = 0  # lines that came after the last attempt to write

    def __call__(self, event: Event) -> None:
        fields = {"time": round(event.time, 3), "kind": event.kind, "step": event.step, **event.fields}
        self._waiting.append(json.dumps({name: _finite(value) for name, value in fields.items()}, allow_nan=False) + "\n")
        self._since_write += 1
        if event.kind == "step_times" and self._since_write < BURST:
            return
        self._since_write = 0
        with contextlib.suppress(OSError):
            _append(self._path, "".join(self._waiting).encode())
            self._waiting.clear()


def _append(path: Path, data: bytes) -> None:
    """Appends all of it; where that fails the file stays as it was and OSError is raised."""
    with path.open("ab", buffering=0) as file:  # 30 us; no open file is left when a job is killed
        before = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(before)
            raise


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null, inside lists and mappings too."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
