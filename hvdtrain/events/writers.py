"""Where events go: plain lines for people, JSON lines for programs."""

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

KEPT = 10000  # lines that wait where a disk has no room
BURST = 1000  # lines of single steps that are written together

_HEAD = "epoch  seconds  epoch s  images/s  train loss  val loss  val acc       lr"


class Console:
    """A line per epoch; inside an epoch a line every `every_s` seconds at most. No control codes: fit for a log file."""

    def __init__(self, out: IO[str], every_s: float) -> None:
        self._out, self._every_s = out, every_s
        self._spoken = time.monotonic()
        self._headed = False

    def __call__(self, event: Event) -> None:
        for line in event.fields.get("lines", ()):
            self._say(line)
        if event.kind == "step" and time.monotonic() - self._spoken >= self._every_s:
            self._say(_step_line(event.step, event.fields))
        elif event.kind == "epoch":
            if not self._headed:
                self._say(_HEAD)
                self._headed = True
            self._say(_epoch_line(event.fields))
            if math.isfinite(event.fields.get("noise_scale", math.nan)):
                self._say(f"       noise scale {event.fields['noise_scale']:.0f}: batches far above that many samples save few steps")

    def _say(self, line: str) -> None:
        self._spoken = time.monotonic()
        try:
            print(writable(line, self._out), file=self._out, flush=True)
        except BrokenPipeError:
            raise  # nobody is there any more, as after the end of mpirun
        except OSError:
            pass  # a file on a full disk: training goes on


def writable(text: str, out: IO[str]) -> str:
    """The text, where the stream's encoding has not all of its letters with \\u65e5 in their place."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def _step_line(step: int, f: dict[str, Any]) -> str:
    done = f"  step {step}, epoch {f['epochs']:.2f} of {f['of']}"
    return f"{done}: train loss {f['loss']:.4f}, {f['images_per_s']:.0f} images/s, lr {f['lr']:.4g}"


def _epoch_line(f: dict[str, Any]) -> str:
    times = f"{f['epoch']:5d}  {f['seconds']:7.1f}  {f['epoch_s']:7.1f}  {f['images_per_s']:8.0f}"
    return f"{times}  {f['train_loss']:10.4f}  {f['val_loss']:8.4f}  {f['val_accuracy']:7.4f}  {f['lr']:7.4g}"


class JsonLines:
    """One JSON object a line, written before the call returns: {"time", "kind", "step", and the event's fields}.

    What finds no room on a full disk waits for the next call, the newest KEPT lines of it: training goes on, and no line is torn.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, deque[str](maxlen=KEPT)
        self._new = 0  # lines since the last try to write

    def __call__(self, event: Event) -> None:
        line = {"time": round(event.time, 3), "kind": event.kind, "step": event.step, **event.fields}
        self._waiting.append(json.dumps({key: _json(value) for key, value in line.items()}, allow_nan=False) + "\n")
        self._new += 1
        if event.kind == "step_times" and self._new < BURST:  # many at once, and a "step" behind them
            return
        self._new = 0
        with contextlib.suppress(OSError):
            _append(self._path, "".join(self._waiting).encode())
            self._waiting.clear()


def _append(path: Path, text: bytes) -> None:
    """All of it, or nothing and an OSError."""
    with path.open("ab", buffering=0) as file:  # 30 us; nothing to close when a job ends badly
        before = file.seek(0, os.SEEK_END)
        try:
            while text:
                text = text[file.write(text) :]
        except OSError:
            file.truncate(before)
            raise


def _json(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are null, inside of lists and mappings too."""
    if isinstance(value, dict):
        return {key: _json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
