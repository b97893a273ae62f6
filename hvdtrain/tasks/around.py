"""Tasks that wrap another one: DelegatingTask, AroundTask, and UserTask for an object of the
user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Concatenated, Metric
from hvdtrain.data.field import Field
from hvdtrain.data.source import Source
from hvdtrain.tasks.rows import Rows
from hvdtrain.tasks.task import FRAMEWORKS, DeviceAndDtype, Task
from hvdtrain.tasks.transform import Transform, Transforms


class DelegatingTask(Task):
    """A task that delegates the abstract members of Task to another object."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.task.fields

    @property
    def sizes(self) -> Mapping[str, Any]:
        return self.task.sizes

    @property
    def summary(self) -> str:
        return self.task.summary

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return self.task.metrics

    @property
    def objective(self) -> str:
        return self.task.objective

    @property
    def sums(self) -> Mapping[str, int]:
        return self.task.sums

    @property
    def sample_weight(self) -> int | None:
        return self.task.sample_weight

    def weight(self, batch: Batch) -> float:
        return self.task.weight(batch)

    def facts(self) -> dict[str, Any]:
        return self.task.facts()

    def outputs(self, samples: int) -> str:
        return self.task.outputs(samples)

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        return self.task.fits(found, samples)


class AroundTask(DelegatingTask):
    """A task that delegates most members to the task that it wraps.

    It has the defaults of `drawn`, `takes_lengths` and `takes_split_logits`: the wrapper computes
    on whole outputs of samples of one length.
    """

    @property
    def frameworks(self) -> tuple[str, ...]:
        return self.task.frameworks

    def part(self, framework: str, model: ModelConfig, place: DeviceAndDtype) -> Any:
        return self.task.part(framework, model, place)

    @property
    def transform(self) -> Transform | None:
        return self.task.transform

    @property
    def transforms(self) -> Transforms | None:
        return self.task.transforms

    @property
    def main_input(self) -> str:
        return self.task.main_input

    @property
    def masks(self) -> Mapping[str, int | None]:
        return self.task.masks

    @property
    def class_label(self) -> str | None:
        return self.task.class_label

    @property
    def mask_label(self) -> str | None:
        return self.task.mask_label

    @property
    def has_user_loss(self) -> bool:
        return self.task.has_user_loss

    @property
    def examples(self) -> Batch | None:
        return self.task.examples

    @property
    def gathered(self) -> dict[str, Callable[[Concatenated], float]]:
        return self.task.gathered

    @property
    def counted(self) -> str:
        return self.task.counted

    @property
    def notes(self) -> Sequence[str]:
        return self.task.notes

    def notes_on_data(self, train: Source, val: Source, has_given_stats: bool) -> list[str]:
        return self.task.notes_on_data(train, val, has_given_stats)

    @property
    def map_names(self) -> tuple[str, ...]:
        return self.task.map_names

    def as_maps(self, values: np.ndarray) -> np.ndarray:
        return self.task.as_maps(values)

    def why_without(self, size: str) -> tuple[str, str]:
        return self.task.why_without(size)

    def rows(self, is_softmax: bool, class_names: Sequence[str] | None) -> Rows:
        return self.task.rows(is_softmax, class_names)


def as_task(found: Any) -> Task:
    """Returns the user's object as a Task."""
    return found if isinstance(found, Task) else UserTask(found)


class UserTask(DelegatingTask):
    """Wraps a user's object with at least the abstract members of Task; missing members have Task's
    defaults."""

    def __getattribute__(self, name: str) -> Any:
        if name in _OPTIONAL and hasattr(task := super().__getattribute__("task"), name):
            return getattr(task, name)
        return super().__getattribute__(name)

    @property
    def frameworks(self) -> tuple[str, ...]:
        return tuple(name for name in FRAMEWORKS if hasattr(self.task, name))

    def part(self, framework: str, model: ModelConfig, place: DeviceAndDtype) -> Any:
        return getattr(self.task, framework)(model, place)

    @property
    def transform(self) -> Transform | None:
        found = getattr(self.task, "transform", None)
        return found if isinstance(found, Transform) else None

    @property
    def transforms(self) -> Transforms | None:
        found = getattr(self.task, "transforms", None)
        return found if isinstance(found, Transforms) else None

    @property
    def main_input(self) -> str:
        found = getattr(self.task, "main_input", None)
        return str(getattr(self.task, "main", "x") if found is None else found)


# members of Task with a default, which UserTask passes on unchanged
_OPTIONAL = {
    name
    for name in vars(Task)
    if not name.startswith("_") and name not in {*vars(DelegatingTask), "transform", "transforms"}
} - {"main_input"}
