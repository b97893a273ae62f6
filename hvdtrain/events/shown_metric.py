"""Which metric of a job is shown beside the loss, and what its samples are called, by its event "start"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class ShownMetric(NamedTuple):
    """The task's objective, or where that is the loss, its first other metric."""

    name: str = "accuracy"  # of the fields val_<name> and, of the objective, best_<name>
    column: str = "acc"  # its short name
    spec: str = ".4f"  # how its values are written
    objective: str = "accuracy"
    unit: str = "images"  # or samples, or tokens, whose rate is shown
    rate: str = "samples_per_s"  # the field that has it


def shown_metric(start: Mapping[str, Any]) -> ShownMetric:
    """From the fields of an event "start"; accuracy where it has no metrics."""
    metrics, objective = start.get("metrics"), start.get("objective")
    if not isinstance(metrics, Mapping) or not isinstance(objective, str):
        return ShownMetric()
    unit = "samples" if start.get("unit") == "samples" else "images"
    rate = "samples_per_s"
    if start.get("counts") == "tokens":
        unit, rate = "tokens", "tokens_per_s"
    name = objective if objective != "loss" else next((other for other in metrics if other != "loss"), "loss")
    described = metrics.get(name)
    described = described if isinstance(described, Mapping) else {}
    return ShownMetric(str(name), str(described.get("column", name)), ".4f" if described.get("percent") else ".4g", objective, unit, rate)
