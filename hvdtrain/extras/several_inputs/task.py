"""SeveralInputs: a task whose model is called with several fields. Each is transformed like a
single x."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.data.around_source import AroundSource
from hvdtrain.data.field import Channels, Field
from hvdtrain.data.source import NamedArrays, Source
from hvdtrain.data.subset import Subset
from hvdtrain.data.user_data.arrays import has_channels_first
from hvdtrain.errors import UserError
from hvdtrain.tasks.around import AroundTask
from hvdtrain.tasks.task import DeviceAndDtype, Task, refuse_nothing
from hvdtrain.tasks.transform import (
    Transform,
    Transforms,
    input_stats,
    is_image,
    without_stats,
)
from hvdtrain.tasks.user_tasks import inside_measured

Build = Callable[[Source, Source], Task]  # builds a task from fields x and y


class SeveralInputs(AroundTask):
    """Wraps a task that was built with one of the fields as x; the model is called with all of
    them."""

    def __init__(self, task: Task, transforms: Transforms) -> None:
        super().__init__(task)
        self._transforms = transforms
        self._main = main_field({name: each.x for name, each in transforms.each.items()})

    @property
    def transform(self) -> None:
        """Always None, because each input has its own transform."""

    @property
    def transforms(self) -> Transforms:
        return self._transforms

    @property
    def main_input(self) -> str:
        return self._main

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Only torch: the other frameworks do not support several inputs."""
        return tuple(name for name in self.task.frameworks if name == "torch")

    @property
    def examples(self) -> Batch | None:
        return None if self.task.examples is None else self.with_names(self.task.examples)

    def with_names(self, batch: Batch) -> Batch:
        """Renames the fields of samples from the names in the wrapped task to the names in the
        data."""
        return {self._main if name == "x" else name: array for name, array in batch.items()}

    @property
    def fields(self) -> dict[str, Field]:
        """The inputs, then the other fields of the task."""
        inputs = {name: transform.x for name, transform in self._transforms.each.items()}
        return {
            **inputs,
            **{
                name: field
                for name, field in self.task.fields.items()
                if name != "x" and name not in inputs
            },
        }

    @property
    def sizes(self) -> dict[str, Any]:
        """Returns the sizes, with `shapes` by field instead of `shape`."""
        sizes = {name: size for name, size in self.task.sizes.items() if name != "shape"}
        return {
            "shapes": {
                name: transform.x.shape or (1,) for name, transform in self._transforms.each.items()
            },
            **sizes,
        }

    @property
    def summary(self) -> str:
        if self.has_user_loss:
            return ", ".join(f"{name} {field}" for name, field in self.fields.items())
        others = [
            f"{name} {each.x}" for name, each in self._transforms.each.items() if name != self._main
        ]
        return "; ".join([f"{self._main} {self.task.summary}", *others])

    def facts(self) -> dict[str, Any]:
        """Returns the facts of the task, and the inputs in order."""
        inputs = []
        for name, each in self._transforms.each.items():
            padding = [] if each.x.padding is None else [list(each.x.padding)]
            inputs.append(
                [
                    name,
                    each.x.dtype,
                    list(each.x.shape),
                    each.mean.tolist(),
                    each.std.tolist(),
                    *padding,
                ]
            )
        return {**self.task.facts(), "inputs": inputs}

    def part(self, framework: str, model: ModelConfig, place: DeviceAndDtype) -> Any:
        from hvdtrain.tasks.torch import TorchFields
        from hvdtrain.tasks.torch_functions import of_fields

        fields = TorchFields(self._transforms.each, place)
        return of_fields(self.task.part(framework, model, place), fields)


def main_field(fields: Mapping[str, Field]) -> str:
    """Returns the field that a task uses as x: x, the first image, or the first field."""
    images = (
        name
        for name, field in fields.items()
        if is_image(field) or (len(field.shape) == 3 and field.dtype.startswith("float"))
    )
    return "x" if "x" in fields else next(images, next(iter(fields)))


def several_inputs(
    build: Build, train: Source, val: Source, names: Iterable[str], standardize: Any, where: str
) -> Task:
    """Builds the task for a user's model that takes these fields of both sets. build: builds the
    task of sources with one x, without changing x.

    standardize: task.standardize, applied to each field as to a single x. Raises UserError if the
    sets do not match.
    """
    if standardize not in (None, True, False):
        raise UserError(
            f"task.standardize is {standardize!r:.40}",
            "task.standardize",
            "true, false, or leave it out",
        )
    transforms = {}
    for name in names:
        field = train.fields[name]
        other = val.fields.get(name)
        refuse_nothing(name, field, where)
        if is_image(field) and has_channels_first(
            field.shape
        ):  # as in files; arrays and samples of a user are already (H, W, C)
            what = f"{name} is {field}, but images are (H, W, C)"
            raise UserError(
                what,
                where,
                f"store {name} with its channels last; or use floats (C, H, W), which are not "
                "changed",
            )
        if other is None or (field.dtype, field.shape) != (other.dtype, other.shape):
            what = (
                f"{name} is {field} in the training set, {other or 'missing'} in the validation set"
            )
            raise UserError(what, where, "both sets need the same fields")
        mean, std = (
            np.broadcast_to(of, field.shape[-1:] or (1,))
            for of in input_stats(train, standardize, True, name)
        )
        transforms[name] = Transform(field._replace(values=0), mean, std)
    main = main_field({name: each.x for name, each in transforms.items()})
    task = build(*(_with_x(without_stats(source), main) for source in (train, val)))
    return with_inputs(task, Transforms(transforms))


def with_inputs(task: Task, transforms: Transforms) -> Task:
    """Returns the task for a model with these inputs."""
    return inside_measured(task, lambda inner: SeveralInputs(inner, transforms))


def around(build: Callable[[Source], Task], source: Source, transforms: Transforms) -> Task:
    """Builds the task for samples of a model whose inputs are transformed as in training. build:
    see several_inputs()."""
    main = main_field({name: each.x for name, each in transforms.each.items()})
    return with_inputs(build(_with_x(source, main)), transforms)


def _with_x(source: Source, name: str) -> Source:
    """Returns the source with the field `name` renamed to x; an existing field x is dropped."""
    if name == "x":
        return source
    if isinstance(source, Subset):
        return dataclasses.replace(source, source=_with_x(source.source, name))
    if isinstance(source, NamedArrays):
        arrays, values, ignored = (
            _renamed(of, name) for of in (source.arrays, source.values, source.ignored)
        )
        gaps = frozenset(_renamed(dict.fromkeys(source.gaps), name))
        return NamedArrays(arrays, values, source.where, ignored, gaps=gaps)
    return _Renamed(source, name)


def _renamed(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"x" if field == name else field: of for field, of in fields.items() if field != "x"}


@dataclass(frozen=True, eq=False)
class _Renamed(AroundSource):
    """A source that is read sample by sample, with a field renamed to x."""

    source: Source
    name: str

    @property
    def fields(self) -> Mapping[str, Field]:
        return _renamed(self.source.fields, self.name)

    def read(self, indices: np.ndarray) -> Batch:
        return _renamed(self.source.read(indices), self.name)

    def known_labels(self) -> np.ndarray | None:
        return self.source.known_labels()

    def known_stats(
        self, name: str, indices: np.ndarray | None = None, channels: Channels = "last"
    ) -> np.ndarray | None:
        return self.source.known_stats(self.name if name == "x" else name, indices, channels)
