"""Any task with metrics of the user's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from hvdtrain.config.schema import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, Sums, ratio
from hvdtrain.errors import UserError, nearest
from hvdtrain.tasks.functions.user_functions import WHERE, OwnMetric
from hvdtrain.tasks.task import Place, Task


class Measured:
    """Another task with metrics of the user's own, one of which, or of the task's, is the objective."""

    def __init__(self, task: Task, metrics: Mapping[str, OwnMetric], objective: str | None, examples: Batch) -> None:
        self.task, self.own, self.examples = task, dict(metrics), examples
        self.objective = objective or task.objective

    def __getattr__(self, name: str) -> Any:
        """All else is the task's; AttributeError for a framework that it does not compute with."""
        found = getattr(self.__dict__["task"], name)
        if name not in ("torch", "jax", "numpy"):
            return found

        def part(model: ModelConfig, place: Place) -> Any:
            return self._measured(name)(found(model, place), self.own, place)

        return part

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (*self.task.metrics, *(_metric(name, own) for name, own in self.own.items()))

    @property
    def sums(self) -> dict[str, int]:
        own = [(f"{name}_sum", one.length) for name, one in self.own.items()]
        counts = [(f"{name}_count", 0) for name, one in self.own.items() if not one.length]
        return {**self.task.sums, **dict(own), **dict(counts)}

    def facts(self) -> dict[str, Any]:
        """With the direction and length of each metric."""
        return {**self.task.facts(), "metrics": {name: [one.better, one.length] for name, one in self.own.items()}}

    def _measured(self, framework: str) -> Any:
        if framework == "torch":
            from hvdtrain.tasks.functions.torch import TorchMeasured

            return TorchMeasured
        if framework == "jax":
            from hvdtrain.tasks.functions.jax import JaxMeasured

            return JaxMeasured
        raise UserError("metrics of a script are not computed with framework=numpy", WHERE, "framework=torch or framework=jax")


def measured(task: Task, metrics: Mapping[str, OwnMetric], objective: str | None, examples: Batch) -> Task:
    """The task with metrics; examples: some samples, to try the functions with.

    Raises UserError where a name is the task's, or the objective is no metric.
    """
    taken = {metric.name for metric in task.metrics}
    if both := taken & metrics.keys():
        raise UserError(f"task.name={task.name} has a metric {min(both)} of its own", WHERE, "another name")
    names = [*taken, *metrics]
    if objective is not None and objective not in names:
        raise UserError(f"objective={objective} is no metric", "hvdtrain.train(), objective", nearest(objective, sorted(names)))
    if not metrics and objective in (None, task.objective):
        return task
    return cast("Task", Measured(task, metrics, objective, examples))


def _metric(name: str, own: OwnMetric) -> Metric:
    if not own.length:
        return Metric(name, ratio(f"{name}_sum", f"{name}_count"), own.better, percent=own.percent)
    of = own.of

    def value(sums: Sums) -> float:
        assert of is not None
        return float(of(np.asarray(sums[f"{name}_sum"], np.float64))) if sums["count"] else math.nan

    return Metric(name, value, own.better, percent=own.percent)
