"""Task: the protocol of what is learned; each task's build() returns one. And what a task does in
each framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config, ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, Parts
from hvdtrain.data.source import Field, Source
from hvdtrain.errors import UserError


class Task(Protocol):
    """What a model is trained for. It is the same on all ranks, knows no rank, and does not change.

    A framework calls the method of its own name, torch(), jax() or numpy(), for its part; a task
    may leave out those it cannot do.
    """

    @property
    def name(self) -> str:
        """The task's name, as in task.name."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields of a sample that the task uses."""

    @property
    def sizes(self) -> Mapping[str, Any]:
        """What models are built from, by the name of their parameter: {"shape": (8, 8, 1),
        "outputs": 10}; plain values of JSON."""

    @property
    def summary(self) -> str:
        """A summary of the data, for people: 28x28x1, 10 classes."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics that are shown; the first is "loss", the mean of what is learned from."""

    @property
    def objective(self) -> str:
        """The name of the metric that stop.target, checkpoint.keep_best and log.targets speak
        of."""

    @property
    def sums(self) -> Mapping[str, int]:
        """The sums that metrics are made of, "loss" among them: 0 of a number, else the length of a
        vector. "count" is not among them."""

    @property
    def sample_weight(self) -> int | None:
        """What weight() of one sample is, where it is the same for all; else None."""

    def weight(self, batch: Batch) -> int:
        """What the loss of these samples on the host is divided by, to be a mean: their number, or
        that of their tokens."""

    def facts(self) -> dict[str, Any]:
        """Plain values of JSON, of which the task's restore() makes it again: a checkpoint keeps
        them, to be compared at a resume."""

    def outputs(self, samples: int) -> str:
        """What a model gives for so many samples, for messages: "logits (2, 10)"."""

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        """Whether a model that gives this shape for so many samples can learn the task."""


MEMBERS = [name for name in vars(Task) if not name.startswith("_")]


def gathered(task: Task) -> tuple[str, ...]:
    """Names of what an evaluation gathers from all ranks besides the sums, as Parts; a task may
    have them as its `gathered`."""
    return tuple(getattr(task, "gathered", ()))


class Each(NamedTuple):
    """Loss and sums of each sample of a batch, as arrays of the framework."""

    # (n,), what is learned from, unweighted; its sum over all samples over the sum of weight() is
    # the loss
    loss: Any
    terms: dict[str, Any]  # (n,) or (n, length) for each of Task.sums but "loss"
    parts: Mapping[str, Parts] = {}  # of an evaluation alone, for each of gathered()


def wrong_shapes(task: Task, each: Any, samples: int) -> str:
    """What is wrong with what a part gave for so many samples; empty where it is what Task.sums
    declares."""
    if not isinstance(each, Each) or not isinstance(each.terms, Mapping):
        return f"gives a {type(each).__name__}, not Each(loss, terms)"
    expected = {
        name: (samples, length) if length else (samples,) for name, length in task.sums.items()
    }
    found = {"loss": each.loss, **each.terms}
    if found.keys() != expected.keys():
        return f"gives {', '.join(sorted(found))}, not the sums {', '.join(sorted(expected))}"
    for name, shape in expected.items():
        if tuple(getattr(found[name], "shape", ())) != shape:
            return (
                f"gives {name} of shape {tuple(getattr(found[name], 'shape', ()))}, not {shape}: "
                "one row for each sample"
            )
    return ""


class Part(Protocol):
    """What a task does in one framework. `batch` has the fields of Task.fields, augmented, and the
    further keys of core/arrays.py."""

    def inputs(self, batch: Any, /) -> Any:
        """What the model is called with, (n, ...); in torch a dict of them where it has several
        inputs."""

    def each(self, outputs: Any, batch: Any, /, training: bool) -> Each:
        """Loss and sums of each sample, in the weights' own number type; they follow from the
        sample and its outputs alone."""


def outputs_of(part: Part) -> Callable[[Any], Any]:
    """What makes of a model's outputs those that each() takes: the outputs themselves, unless the
    part has an outputs_of()."""
    return getattr(part, "outputs_of", lambda found: found)


def counts_exactly(part: Part) -> bool:
    """Whether its terms are whole numbers that are too large for 32 bits once they are added up
    over a data set."""
    return bool(getattr(part, "counts_exactly", False))


class NumpyPart(Part, Protocol):
    """A task's part in NumPy, which has no gradients of its own."""

    def gradient(self, outputs: np.ndarray, batch: Any, /) -> np.ndarray:
        """d(loss of each sample) / d(outputs), (n, outputs), in training."""


class Place(NamedTuple):
    """Where a part computes, as its framework names it."""

    dtype: Any  # of the model's numbers
    device: Any = None


def part_of(task: Task, framework: str, config: Config, place: Place) -> Any:
    """What a task does in a framework. Raises UserError where it has no part for it."""
    make = getattr(task, framework, None)
    if make is None:
        known = [name for name in ("torch", "jax", "numpy") if hasattr(task, name)]
        what = f"task.name={task.name} does not compute with framework={config.framework}"
        raise UserError(
            what, config.where("framework"), f"framework={' or framework='.join(known)}"
        )
    return make(config.model, place)


def is_users_model(model: ModelConfig) -> bool:
    """Whether it is a class, a function or an object of the user's own, not one of hvdtrain's."""
    return is_dotted(model.name)


def find_field(source: Source, name: str, task: str, where: str, expected: str) -> Field:
    """A field that a task needs. Raises UserError where the data do not have it."""
    if name not in source.fields:
        shown = ", ".join(f"{field} {kind}" for field, kind in source.fields.items())
        raise UserError(
            f"task.name={task} needs a field {name}, {expected}; the data have {shown}",
            where,
            "another task.name, or other data",
        )
    refuse_nothing(name, source.fields[name], where)
    return source.fields[name]


def refuse_nothing(name: str, field: Field, where: str) -> None:
    """Raises UserError where a sample has no number of a field."""
    if 0 in field.shape:
        raise UserError(
            f"{name} is {field}: no number at all", where, "one number or more of each sample"
        )


def tokens_of_sample(task: Task) -> int | None:
    """How many tokens each sample has, where it has tokens and all have equally many."""
    if any(field.padding is not None for field in task.fields.values()):
        return None
    found: int | None = task.sizes.get("context")
    return found


def samples_of(task: Task) -> str:
    """What its samples are called for people: images, or samples."""
    return (
        "images"
        if any(field.dtype == "uint8" and len(field.shape) == 3 for field in task.fields.values())
        else "samples"
    )


def objective(task: Task) -> Metric:
    """The metric of Task.objective."""
    return next(metric for metric in task.metrics if metric.name == task.objective)
