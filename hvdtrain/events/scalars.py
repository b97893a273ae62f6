"""The numbers of an event under the tags that trackers show: {"train/loss": 0.31, "speed/images_per_s": 5210.0, ...}."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from hvdtrain.events.log import Event

# field -> tag, by kind of event. A field of several numbers becomes a tag for each: "speed/phase_ms/forward".
_STEP = {
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "lr": "train/lr",
    "batch": "train/batch",
    "epochs": "train/epochs",
    "images_per_s": "speed/images_per_s",
    "phase_ms": "speed/phase_ms",
    "work_ms": "speed/work_ms",
    "slowest_rank": "speed/slowest_rank",
    "memory_mb": "memory/host_mb",
    "gpu_memory_mb": "memory/gpu_mb",
    "watts": "power/watts",
    "noise_scale": "noise_scale/samples",
}
_EPOCH = {
    "val_loss": "val/loss",
    "val_accuracy": "val/accuracy",
    "best_accuracy": "val/best_accuracy",
    "epoch": "epoch/number",
    "epoch_s": "epoch/seconds",
    "train_loss": "epoch/train_loss",
    "train_accuracy": "epoch/train_accuracy",
    "images_per_s": "epoch/images_per_s",
    "noise_scale": "epoch/noise_scale",
    "joules": "energy/joules",
    "wh": "energy/wh",
    "watts": "energy/watts",
    "joules_per_image": "energy/joules_per_image",
}
_JOB = {
    "val_accuracy": "job/val_accuracy",
    "best_accuracy": "job/best_accuracy",
    "best_epoch": "job/best_epoch",
    "seconds": "job/seconds",
    "epochs": "job/epochs",
    "images": "job/images",
    "images_per_s": "job/images_per_s",
    "joules": "job/joules",
    "joules_per_image": "job/joules_per_image",
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
_TARGET_FIELDS = ("seconds", "epochs", "images", "joules", "val_accuracy")
_LIST_ITEMS = {"work_ms": ("min", "median", "max")}  # what the items of a list field are
_NOT_IN_TAGS = re.compile(r"[^\w./ -]", re.ASCII)  # all but the letters that every tracker accepts


def scalars(event: Event) -> dict[str, float]:
    """The finite numbers of an event by tag; empty for kinds that have no curve, such as start and step_times."""
    tags = _TAGS.get(event.kind, {})
    if event.kind == "target":
        tags = {name: f"target/{event.fields.get('target', math.nan):g}/{name}" for name in _TARGET_FIELDS}
    numbers = (pair for field, tag in tags.items() for pair in _numbers(tag, event.fields.get(field), _LIST_ITEMS.get(field, ())))
    return {_NOT_IN_TAGS.sub("_", tag): number for tag, number in numbers if math.isfinite(number)}


def _numbers(tag: str, value: Any, items: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """(tag, number) of a number; one for each inner value of a mapping, and of a list whose items have names."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(f"{tag}/{name}", inner, ())
    elif isinstance(value, list | tuple):
        for name, inner in zip(items, value, strict=False):
            yield from _numbers(f"{tag}/{name}", inner, ())
    elif isinstance(value, Real) and not isinstance(value, bool):
        yield tag, float(value)
