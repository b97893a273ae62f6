"""Reads a run from its folder, during the job or after a crash: configuration, events, metrics and
evaluations; also as a DataFrame."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.read import read_run_config
from hvdtrain.core.folder import NO_LINKS, Folder, WrongKind
from hvdtrain.errors import UserError
from hvdtrain.events.redaction import redact_urls

if TYPE_CHECKING:
    import pandas
from typing import NamedTuple

# the fields of an event: "time", "kind", "step", and the fields in docs/events.md
Fields = dict[str, Any]
_OF_EVALUATIONS = ("epoch", "target")
# a resumed job writes them again for the steps that it repeats
_REPEATED_KINDS = (
    "step",
    "epoch",
    "target",
    "step_times",
    "nonfinite",
    "passes",
)
_OUTCOMES = {"end": "done", "stop": "stopped", "failed": "failed"}
# limit for a number: more than float32 can represent, but matplotlib can still scale it
_LARGEST = 1e45
_LATEST_S = 1e11  # seconds since 1970 that time.gmtime() accepts
MOST_FILE_BYTES = 2**32
MOST_LINE_BYTES = 2**22  # limit for an event; a start event of 4,096 ranks has 0.2 MB
# limit for all events: 300,000 events of steps, or a million of step_times
MOST_MEMORY_BYTES = 600 * 2**20
_VALUE_BYTES = 80
_MOST_DEPTH = 8  # limit for nesting; an event has three levels
_FEWER_EVENTS = "fewer events; a larger log.every_steps writes fewer, and log.step_times=false"
_EVENT_PREFIX = b'{"time":'  # the beginning of every line
_STEP_TIMES = b'"kind": "step_times"'
_KINDS_OF_ROWS = ("step", "epoch", "target", "step_times")  # kinds in a DataFrame
_LIST_ITEMS = {"work_ms": ("min", "median", "max")}  # names of the items of a list field


@dataclass(frozen=True)
class RunRecord:
    """One run: `events` in the order of the file, without events of steps that a resumed job
    repeated."""

    folder: Path
    config: dict[str, Any]  # by dotted key; empty if config.yaml is missing or cannot be read
    events: list[Fields]

    def events_of(self, kind: str) -> list[Fields]:
        return [event for event in self.events if event["kind"] == kind]

    def step_events(self) -> list[Fields]:
        return self.events_of("step")

    def epoch_events(self) -> list[Fields]:
        return self.events_of("epoch")

    @property
    def start_event(self) -> Fields:
        """The event of the last start; empty if a crash destroyed it."""
        return next(reversed(self.events_of("start")), {})

    @property
    def end_event(self) -> Fields:
        """The event (end, stop, failed) that ended the last start; empty while the job runs, and
        after a kill."""
        last = next(
            (event for event in reversed(self.events) if event["kind"] in (*_OUTCOMES, "start")), {}
        )
        return last if last.get("kind") in _OUTCOMES else {}

    @property
    def ending(self) -> str:
        """How the job ended and why, without secrets."""
        end = self.end_event
        if end:
            return redact_urls(
                f"{_OUTCOMES[end['kind']]}: {end.get('reason') or 'no reason given'}"
            )
        last = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.last_of_job["time"]))
        return f"no end: it is running, or was killed; last event {last}"

    @property
    def last_of_job(self) -> Fields:
        """The last event of the job; a separate evaluation may come days later."""
        return next(
            (event for event in reversed(self.events) if event["kind"] != "evaluation"),
            self.events[-1],
        )

    @property
    def ranks(self) -> int | None:
        """Number of ranks at the last start; None if unknown."""
        ranks = number(self.start_event, "ranks")
        return int(ranks) if math.isfinite(ranks) else None

    def seconds_at(self, event: Fields) -> float:
        """Returns seconds of the job up to an event; seconds since the first event if the event has
        no field `seconds`."""
        seconds = number(event, "seconds")
        return (
            seconds if math.isfinite(seconds) else max(0.0, event["time"] - self.events[0]["time"])
        )


def number(event: Fields, name: str) -> float:
    """Returns a field as a number, `phase_ms.forward` for one inside a mapping; NaN if it is
    missing, null, not a number or too large."""
    value: Any = event
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    return float(value) if abs(value) < _LARGEST else math.nan


def numbers(event: Fields, name: str) -> list[float]:
    """Returns a field as a list, with NaN for each item that is not a number; empty if it is not a
    list."""
    value = event.get(name)
    return [number({"item": item}, "item") for item in value] if isinstance(value, list) else []


def read_run(folder: Path, step_times: bool = False) -> RunRecord:
    """Reads the run in a folder. step_times: also read the many events of single steps
    (log.step_times).

    Raises UserError if there is no run, or it cannot be read.
    """
    path = folder / "events.jsonl"
    try:
        if not folder.is_dir():
            raise UserError(
                f"there is no run folder {folder}",
                "RUN",
                "give the folder that `run folder:` names at the end of a job",
            )
        with Folder.open(folder) as opened, opened.open_file(path.name) as file:
            if os.fstat(file.fileno()).st_size > MOST_FILE_BYTES:
                raise UserError(
                    f"{path} has more than {MOST_FILE_BYTES // 2**30} GiB",
                    "RUN",
                    f"give a run folder with {_FEWER_EVENTS}",
                )
            events = _without_repeated_steps(_bounded(_events(file, step_times), path))
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no events.jsonl",
            "RUN",
            "give a run folder: it has config.yaml and events.jsonl",
        ) from None
    except WrongKind as error:
        raise UserError(f"{path} is {error.strerror}", "RUN", NO_LINKS) from None
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}",
            "RUN",
            "give a run folder that can be read",
        ) from None
    if not events:
        raise UserError(
            f"{path} has no event",
            "RUN",
            "the job has not started yet: give another run, or wait for its first line",
        )
    return RunRecord(folder, _read_config(folder), events)


def _events(file: BufferedReader, step_times: bool) -> Iterator[tuple[Fields, int]]:
    """Yields each event with the length of its line; lines of more than MOST_LINE_BYTES are
    skipped."""
    while line := file.readline(MOST_LINE_BYTES):
        if not line.endswith(b"\n") and len(line) == MOST_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MOST_LINE_BYTES)
        elif step_times or _STEP_TIMES not in _last_event(line):
            for event in _parse(line):
                yield event, _memory_bytes(line)


def _memory_bytes(line: bytes) -> int:
    """Returns an upper estimate of the memory of the parsed line: each value is an object."""
    return len(line) + _VALUE_BYTES * (line.count(b",") + line.count(b"[") + line.count(b"{"))


def _bounded(events: Iterator[tuple[Fields, int]], path: Path) -> Iterator[Fields]:
    """Passes on events. Raises UserError if they would take more than MOST_MEMORY_BYTES."""
    total = 0
    for event, size in events:
        total += size
        if total > MOST_MEMORY_BYTES:
            what = f"the events of {path} take more than {MOST_MEMORY_BYTES // 2**20} MiB of memory"
            raise UserError(what, "RUN", f"give a run folder with {_FEWER_EVENTS}")
        yield event


def _parse(line: bytes) -> Iterator[Fields]:
    """Yields the event of a line, or nothing. If a crash truncated a line, a resumed job appends to
    it: then the line's last event counts."""
    for candidate in (line, _last_event(line)):
        try:
            event = json.loads(candidate, parse_constant=lambda _: None)
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            continue
        if (
            isinstance(event, dict)
            and isinstance(event.get("kind"), str)
            and _has_time_and_step(event)
            and _is_flat(event, _MOST_DEPTH)
        ):
            yield event
        return


def _last_event(line: bytes) -> bytes:
    """Returns the line from the beginning of its last event."""
    return line[max(0, line.rfind(_EVENT_PREFIX)) :]


def _is_flat(value: Any, levels: int) -> bool:
    """Whether lists and mappings in it are nested at most `levels` deep."""
    if not isinstance(value, dict | list):
        return True
    return levels > 0 and all(
        _is_flat(inner, levels - 1)
        for inner in (value.values() if isinstance(value, dict) else value)
    )


def _has_time_and_step(event: Fields) -> bool:
    """Whether time and step are within their limits; False for NaN."""
    return 0 <= number(event, "time") < _LATEST_S and 0 <= number(event, "step") < _LARGEST


def _without_repeated_steps(events: Iterator[Fields]) -> list[Fields]:
    """Drops earlier events of repeated steps and evaluations, after a resume or a loss of ranks."""
    kept: list[Fields] = []
    for event in events:
        if event["kind"] in ("start", "lost"):
            kept = [
                old
                for old in kept
                if old["kind"] not in _REPEATED_KINDS or old["step"] <= event["step"]
            ]
        if event["kind"] == "lost" and number(event, "evaluated") < event["step"]:
            kept = [
                old
                for old in kept
                if old["kind"] not in _OF_EVALUATIONS or old["step"] < event["step"]
            ]
        kept.append(event)
    return kept


def _read_config(folder: Path) -> dict[str, Any]:
    """Reads config.yaml; empty if it cannot be read, because a run can be reported without it."""
    try:
        return {assignment.key: assignment.value for assignment in read_run_config(folder)}
    except UserError:
        return {}


def to_dataframe(run: RunRecord) -> pandas.DataFrame:
    """Converts to rows in the order of the job, index 0..n; columns time, kind, step, then the
    events' fields, nested ones as `phase_ms.forward`.

    A field that an event lacks is NaN. attrs["config"] is the configuration by dotted key,
    attrs["run"] the folder. Rows of single steps are there if the run was read with step_times.
    Raises UserError if pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise UserError(
            "pandas is not installed", "hvdtrain.read()", "pip install 'hvdtrain[notebook]'"
        ) from None
    rows = [_flat(event) for event in run.events if event["kind"] in _KINDS_OF_ROWS]
    columns = dict.fromkeys(["time", "kind", "step", *(name for row in rows for name in row)])
    frame = pandas.DataFrame(rows, columns=list(columns))
    frame.attrs = {"run": str(run.folder), "config": dict(run.config)}
    return frame


def _flat(event: Fields, prefix: str = "") -> Fields:
    """Flattens mappings, and lists whose items have names, to dotted fields."""
    flat: Fields = {}
    for name, value in event.items():
        items = _LIST_ITEMS.get(name)
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif items and isinstance(value, list) and len(value) == len(items):
            flat |= {
                f"{prefix}{name}.{item}": _nan_for_none(inner)
                for item, inner in zip(items, value, strict=True)
            }
        else:
            flat[prefix + name] = _nan_for_none(value)
    return flat


def _nan_for_none(value: Any) -> Any:
    return math.nan if value is None else value


LONGEST_NAME = 40  # characters of a name
_MOST_METRICS = 16


class RunMetric(NamedTuple):
    """A metric of a run's task."""

    name: str
    lower_is_better: bool = False
    percent: bool = False

    def shown(self, value: float) -> str:
        """Formats a value; empty for NaN."""
        if not math.isfinite(value):
            return ""
        return f"{100 * value:.2f}%" if self.percent else f"{value:.4g}"


ACCURACY = RunMetric("accuracy", percent=True)
# for a run from before other tasks were added
_OLDER = {
    "loss": RunMetric("loss", lower_is_better=True),
    "accuracy": ACCURACY,
}


def metrics_of(run: RunRecord) -> dict[str, RunMetric]:
    """Returns the metrics of a run by name."""
    described = run.start_event.get("metrics")
    if not isinstance(described, dict):
        return _OLDER
    metrics = {}
    for name, how in list(described.items())[:_MOST_METRICS]:
        if isinstance(how, dict) and name.isprintable() and 0 < len(name) <= LONGEST_NAME:
            metrics[name] = RunMetric(name, how.get("better") == "min", how.get("percent") is True)
    return metrics


def objective_of(run: RunRecord) -> RunMetric:
    """Returns the metric of stop.target and checkpoint.keep_best."""
    name = run.start_event.get("objective")
    return metrics_of(run).get(name, ACCURACY) if isinstance(name, str) else ACCURACY
