"""The data that trackers store: the numbers of an event by tag ({"train/loss": 0.31, ...}), the
configuration, and the id of a resumed run."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from hvdtrain.config.schema import Config
from hvdtrain.core.folder import Folder
from hvdtrain.errors import UserError
from hvdtrain.events import redaction
from hvdtrain.events.log import Event

METRICS: tuple[str, ...] = ("loss", "accuracy")  # if the event "start" does not name them
# throughput of one device
_OF_DEVICE = ("device_samples_per_s", "device_tokens_per_s", "device_tflops", "mfu")
# field -> tag, by kind of event, besides metrics. A field of several numbers becomes a tag
# for each: "speed/phase_ms/forward".
_STEP = {
    "lr": "train/lr",
    "batch": "train/batch",
    "epochs": "train/epochs",
    "logged": "train",  # the logged values of a custom loop, by name
    "samples_per_s": "speed/samples_per_s",
    "tokens_per_s": "speed/tokens_per_s",
    **{name: f"speed/{name}" for name in _OF_DEVICE},
    "gpu_percent": "speed/gpu_percent",
    "phase_ms": "speed/phase_ms",
    "work_ms": "speed/work_ms",
    "slowest_rank": "speed/slowest_rank",
    "memory_mb": "memory/host_mb",
    "gpu_memory_mb": "memory/gpu_mb",
    "watts": "power/watts",
    "noise_scale": "noise_scale/samples",
}
_EPOCH = {
    "epoch": "epoch/number",
    "epochs": "epoch/done",
    "epoch_s": "epoch/seconds",
    "logged": "epoch",  # as of a step
    "samples_per_s": "epoch/samples_per_s",
    "tokens_per_s": "epoch/tokens_per_s",
    **{name: f"epoch/{name}" for name in _OF_DEVICE},
    "noise_scale": "epoch/noise_scale",
    "joules": "energy/joules",
    "wh": "energy/wh",
    "watts": "energy/watts",
    "joules_per_sample": "energy/joules_per_sample",
}
_JOB = {
    "best_epoch": "job/best_epoch",
    "seconds": "job/seconds",
    "epochs": "job/epochs",
    "samples": "job/samples",
    "tokens_per_s": "job/tokens_per_s",
    "samples_per_s": "job/samples_per_s",
    **{name: f"job/{name}" for name in _OF_DEVICE},
    "joules": "job/joules",
    "joules_per_sample": "job/joules_per_sample",
}
_TAGS = {
    "step": _STEP,
    "epoch": _EPOCH,
    "end": _JOB,
    "stop": _JOB,
    "started": {"start_s": "start_s"},
    "checkpoint": {name: f"checkpoint/{name}" for name in ("pause_s", "write_s", "megabytes")},
    "nonfinite": {"count": "nonfinite/count"},
}
_TARGET_FIELDS = ("seconds", "epochs", "samples", "joules")
_LIST_ITEMS = {"work_ms": ("min", "median", "max")}  # names of the items of a list field
_NOT_IN_TAGS = re.compile(r"[^\w./ -]", re.ASCII)  # all but the letters that every tracker accepts
_MOST_BYTES = 1000  # limit for a file with an id
# id of a run: it names files and folders, and is part of an address
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def metric_names(event: Event, known: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the task's metrics, if the event is a "start" that names them; else `known`."""
    metrics = event.fields.get("metrics") if event.kind == "start" else None
    return tuple(metrics) if isinstance(metrics, Mapping) else known


def scalars(event: Event, metrics: tuple[str, ...] = METRICS) -> dict[str, float]:
    """Returns the finite numbers of an event by tag; empty for kinds that have no curve, such as
    start and step_times."""
    tags = _TAGS.get(event.kind, {}) | _metric_tags(event.kind, metrics)
    if event.kind == "target":
        names = (*_TARGET_FIELDS, *(f"val_{name}" for name in metrics))
        tags = {name: f"target/{event.fields.get('target', math.nan):g}/{name}" for name in names}
    numbers = (
        pair
        for field, tag in tags.items()
        for pair in _numbers(tag, event.fields.get(field), _LIST_ITEMS.get(field, ()))
    )
    return {_NOT_IN_TAGS.sub("_", tag): number for tag, number in numbers if math.isfinite(number)}


def _metric_tags(kind: str, metrics: tuple[str, ...]) -> dict[str, str]:
    """Returns the event fields of the metrics."""
    if kind == "step":
        return {name: f"train/{name}" for name in metrics}
    tags: dict[str, str] = {}
    for name in metrics:
        if kind == "epoch":
            tags |= {
                f"val_{name}": f"val/{name}",
                f"best_{name}": f"val/best_{name}",
                f"train_{name}": f"epoch/train_{name}",
            }
        elif kind in ("end", "stop"):
            tags |= {f"val_{name}": f"job/val_{name}", f"best_{name}": f"job/best_{name}"}
    return tags


def _numbers(tag: str, value: Any, items: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Yields (tag, number) for a number, for each inner value of a mapping, and for each item of a
    list whose items have names."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(f"{tag}/{name}", inner, ())
    elif isinstance(value, list | tuple):
        for name, inner in zip(items, value, strict=False):
            yield from _numbers(f"{tag}/{name}", inner, ())
    elif isinstance(value, Real) and not isinstance(value, bool):
        yield tag, float(value)


def load_run_id(path: Path, first: Event) -> str | None:
    """Returns the id that an earlier start of the job saved; None without one, or if the first
    event is at step 0, because the job starts over."""
    if first.step == 0:
        return None
    try:
        with Folder.open(path.parent) as folder:
            run_id = json.loads(folder.read(path.name, _MOST_BYTES))["run_id"]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ):  # missing, or cut off by a crash: a new run is better than none
        return None
    return run_id if isinstance(run_id, str) and _ID.fullmatch(run_id) else None


def save_run_id(path: Path, run_id: str) -> None:
    """Saves the id. Raises OSError if the file cannot be written."""
    with Folder.open(path.parent) as folder:
        folder.replace(path.name, (json.dumps({"run_id": run_id}) + "\n").encode())


def require_package(package: str, extra: str) -> None:
    """Raises UserError if a package is not installed; imports nothing."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{package} is not installed", "log.trackers", f"pip install 'hvdtrain[{extra}]'"
        )


def redacted_config(config: Config) -> dict[str, Any]:
    """Returns the configuration as in config.yaml: {"epochs": 10, "batch": {"size": 64, ...},
    ...}."""
    redacted: dict[str, Any] = redaction.redact(config.model_dump())
    return redacted


def flat_config(config: Config) -> dict[str, str]:
    """Returns the configuration with dotted keys, values as JSON: {"epochs": "10", "batch.size":
    "64", ...}."""
    return dict(_flat("", redacted_config(config)))


def _flat(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield (
                f"{prefix}{key}",
                value if isinstance(value, str) else json.dumps(value, default=str),
            )
