"""One run read back from its folder: its configuration and its events, while it is written or after a crash."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.config.read import read_file
from hvdtrain.errors import UserError
from hvdtrain.events.redaction import redact_urls

Fields = dict[str, Any]  # of one event
_DONE_AGAIN = ("step", "epoch", "target", "step_times", "nonfinite")  # kinds that a resumed job says again for the same steps
_ENDS = {"end": "done", "stop": "stopped", "failed": "failed"}
_MOST = 1e45  # above float32's largest: what matplotlib can scale
_LATEST = 1e11  # seconds since 1970 that a calendar knows
_BEGIN = b'{"time":'  # of every line
_ONE_STEP = b'"kind": "step_times"'


@dataclass(frozen=True)
class Record:
    """A run: `events` in the order of the file, without the steps that a resumed job did again."""

    folder: Path
    config: dict[str, Any]  # dotted key -> value; empty where there is no config.yaml that can be read
    events: list[Fields]

    def of(self, kind: str) -> list[Fields]:
        return [event for event in self.events if event["kind"] == kind]

    def steps(self) -> list[Fields]:
        return self.of("step")

    def epochs(self) -> list[Fields]:
        return self.of("epoch")

    @property
    def start(self) -> Fields:
        """The last start: how the job runs, or ran in the end. Empty where a crash took it."""
        return next(reversed(self.of("start")), {})

    @property
    def end(self) -> Fields:
        """The event that ended the last start; empty where there is none."""
        last = next((event for event in reversed(self.events) if event["kind"] in (*_ENDS, "start")), {})
        return last if last.get("kind") in _ENDS else {}

    @property
    def ending(self) -> str:
        """How it ended, in words that a page may show."""
        if end := self.end:
            return redact_urls(f"{_ENDS[end['kind']]}: {end.get('reason') or 'no reason is told'}")
        last = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.events[-1]["time"]))
        return f"no end: it is running, or was killed; last event {last}"

    @property
    def ranks(self) -> int | None:
        """Of the last start."""
        ranks = number(self.start, "ranks")
        return int(ranks) if math.isfinite(ranks) else None

    def seconds(self, event: Fields) -> float:
        """Job seconds up to an event; by the clock since the first event where the event does not tell them."""
        known = number(event, "seconds")
        return known if math.isfinite(known) else max(0.0, event["time"] - self.events[0]["time"])


def number(event: Fields, name: str) -> float:
    """A field as a number, `phase_ms.forward` for one within; NaN where it is absent, null, or none that could be drawn."""
    value: Any = event
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST  # NaN is below nothing
    return float(value) if known else math.nan


def numbers(event: Fields, name: str) -> list[float]:
    """A field that is a list of numbers; NaN for each that is none; empty where there is no list."""
    value = event.get(name)
    return [number({"one": one}, "one") for one in value] if isinstance(value, list) else []


def read_record(folder: Path, step_times: bool = False) -> Record:
    """The run in a folder. The events of single steps (log.step_times) are many: they are read where they are asked for.

    Raises UserError where there is no run.
    """
    path = folder / "events.jsonl"
    try:
        if not folder.is_dir():
            raise UserError(f"there is no run folder {folder}", "RUN", "give the folder that `run folder:` names at the end of a job")
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{folder} has no events.jsonl", "RUN", "give a run folder: it has config.yaml and events.jsonl") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}", "RUN", "give a run folder that can be read") from None
    events = _last_values(event for line in data.splitlines() if step_times or _ONE_STEP not in _last(line) for event in _read(line))
    if not events:
        raise UserError(f"{path} holds no event", "RUN", "the job had not begun: give another run, or wait for its first line")
    return Record(folder, _config(folder / "config.yaml"), events)


def _read(line: bytes) -> Iterator[Fields]:
    """The event of a line, none where it is torn. A job that goes on writes behind what a crash tore: the last event of a line counts."""
    for text in (line, _last(line)):
        try:
            found = json.loads(text, parse_constant=lambda _: None)
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            continue
        if isinstance(found, dict) and isinstance(found.get("kind"), str) and _has_place(found):
            yield found
        return


def _last(line: bytes) -> bytes:
    """From where its last event begins."""
    return line[max(0, line.rfind(_BEGIN)) :]


def _has_place(event: Fields) -> bool:
    """In time and in the job; NaN is on no side of a limit."""
    return 0 <= number(event, "time") < _LATEST and 0 <= number(event, "step") < _MOST


def _last_values(events: Iterator[Fields]) -> list[Fields]:
    """Steps after the checkpoint that a job went on from are done again: what was said of them before does not count."""
    kept: list[Fields] = []
    for event in events:
        if event["kind"] == "start":
            kept = [old for old in kept if old["kind"] not in _DONE_AGAIN or old["step"] <= event["step"]]
        kept.append(event)
    return kept


def _config(path: Path) -> dict[str, Any]:
    """The report of a run without its configuration is worth having."""
    try:
        return {assignment.key: assignment.value for assignment in read_file(str(path))}
    except UserError:
        return {}
