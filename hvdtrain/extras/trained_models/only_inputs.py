"""OnlyInputs: a task for predictions, without targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, ratio
from hvdtrain.data.field import Field
from hvdtrain.tasks.around import DelegatingTask
from hvdtrain.tasks.rows import Rows
from hvdtrain.tasks.task import DeviceAndDtype, Each, TaskPart, outputs_of
from hvdtrain.tasks.transform import Transform


class OnlyInputs(DelegatingTask):
    """Wraps a task and removes its targets. Models are built and called in the same way, and the
    loss is 0."""

    metrics = (Metric("loss", ratio("loss", "count"), "min"),)
    objective = "loss"
    sums = MappingProxyType({"loss": 0})
    sample_weight = 1

    @property
    def fields(self) -> dict[str, Field]:
        """The inputs of the model."""
        return self.task.input_fields

    @property
    def transform(self) -> Transform | None:
        return self.task.transform

    @property
    def has_user_loss(self) -> bool:
        return self.task.has_user_loss

    @property
    def mask_label(self) -> str | None:
        return self.task.mask_label

    @property
    def map_names(self) -> tuple[str, ...]:
        return self.task.map_names

    def as_maps(self, values: np.ndarray) -> np.ndarray:
        return self.task.as_maps(values)

    def weight(self, batch: Batch) -> int:
        return len(next(iter(batch.values())))

    def rows(self, is_softmax: bool, class_names: Sequence[str] | None) -> Rows:
        return self.task.rows(is_softmax, class_names)

    @property
    def frameworks(self) -> tuple[str, ...]:
        return self.task.frameworks

    def part(self, framework: str, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        return _WithoutLoss(self.task.part(framework, model, place))


class _WithoutLoss:
    """Wraps a part in any framework and makes its loss 0."""

    def __init__(self, part: TaskPart) -> None:
        self.inputs = part.inputs
        self.outputs_of = outputs_of(part)

    def each(self, outputs: Any, batch: Any, training: bool) -> Each:
        if isinstance(outputs, Mapping):
            outputs = tuple(outputs.values())
        first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        return Each(
            (first if first.ndim == 1 else first.sum(tuple(range(1, first.ndim)))) * 0.0, {}
        )

    def gradient(self, outputs: Any, batch: Any) -> Any:
        return outputs * 0.0
