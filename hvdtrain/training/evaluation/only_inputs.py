"""A trained model's task where nothing but the inputs of its samples is known: what a prediction needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hvdtrain.config.schema import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, ratio
from hvdtrain.data.source import Field
from hvdtrain.tasks.task import Each, NumpyPart, Part, Place, Task


@dataclass(frozen=True)
class OnlyInputs:
    """Another task without its targets: models are built and called as by that one, and the loss is 0."""

    task: Task

    metrics = (Metric("loss", ratio("loss", "count"), "min"),)
    objective = "loss"
    sums = MappingProxyType({"loss": 0})
    sample_weight = 1

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def fields(self) -> dict[str, Field]:
        """x, or of a task without it all fields: tokens."""
        fields = dict(self.task.fields)
        return {"x": fields["x"]} if "x" in fields else fields

    @property
    def sizes(self) -> Mapping[str, Any]:
        return self.task.sizes

    @property
    def summary(self) -> str:
        return self.task.summary

    def weight(self, batch: Batch) -> int:
        return len(next(iter(batch.values())))

    def facts(self) -> dict[str, Any]:
        return self.task.facts()

    def outputs(self, samples: int) -> str:
        return self.task.outputs(samples)

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        return self.task.fits(found, samples)

    def torch(self, model: ModelConfig, place: Place) -> Part:
        return _WithoutLoss(self._part("torch", model, place))

    def jax(self, model: ModelConfig, place: Place) -> Part:
        return _WithoutLoss(self._part("jax", model, place))

    def numpy(self, model: ModelConfig, place: Place) -> NumpyPart:
        return _WithoutLoss(self._part("numpy", model, place))

    def _part(self, framework: str, model: ModelConfig, place: Place) -> Part:
        made: Part = getattr(self.task, framework)(model, place)
        return made


class _WithoutLoss:
    """A part of a framework, by whatever arrays it computes with."""

    def __init__(self, part: Part) -> None:
        self.inputs = part.inputs

    def each(self, outputs: Any, batch: Any, training: bool) -> Each:
        if isinstance(outputs, Mapping):
            outputs = tuple(outputs.values())
        first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        return Each((first if first.ndim == 1 else first.sum(tuple(range(1, first.ndim)))) * 0.0, {})

    def gradient(self, outputs: Any, batch: Any) -> Any:
        return outputs * 0.0
