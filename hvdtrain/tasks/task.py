"""Task: the base class of what is learned; each task's build() returns one. And what a task does in
each framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Concatenated, Metric
from hvdtrain.data.field import Field
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.tasks.rows import Rows, rows_of_numbers
from hvdtrain.tasks.transform import Transform, Transforms

FRAMEWORKS = ("torch", "jax", "numpy")


class Task(ABC):
    """What a model is trained for. It is the same on all ranks, knows no rank, and does not change.

    The abstract members are what every task has; the defaults of the others are the simplest case,
    and a task replaces them by attributes of its class or by properties. The methods torch(),
    jax() and numpy() give its part in a framework; a task leaves out those that it cannot do.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The task's name, as in task.name."""

    @property
    @abstractmethod
    def fields(self) -> Mapping[str, Field]:
        """The fields of a sample that the task uses."""

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, Any]:
        """What models are built from, by the name of their parameter: {"shape": (8, 8, 1),
        "outputs": 10}; plain values of JSON."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """A summary of the data, for people: 28x28x1, 10 classes."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics that are shown; the first is "loss", the mean of what is learned from."""

    @property
    @abstractmethod
    def objective(self) -> str:
        """The name of the metric that stop.target, checkpoint.keep_best and log.targets speak
        of."""

    @property
    @abstractmethod
    def sums(self) -> Mapping[str, int]:
        """The sums that metrics are made of, "loss" among them: 0 of a number, else the length of a
        vector. "count" is not among them."""

    @property
    @abstractmethod
    def sample_weight(self) -> int | None:
        """What weight() of one sample is, where it is the same for all; else None."""

    @abstractmethod
    def weight(self, batch: Batch) -> int:
        """What the loss of these samples on the host is divided by, to be a mean: their number, or
        that of their tokens."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Plain values of JSON, of which the task's restore() makes it again: a checkpoint keeps
        them, to be compared at a resume."""

    @abstractmethod
    def outputs(self, samples: int) -> str:
        """What a model gives for so many samples, for messages: "logits (2, 10)"."""

    @abstractmethod
    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        """Whether a model that gives this shape for so many samples can learn the task."""

    @property
    def frameworks(self) -> tuple[str, ...]:
        """The frameworks in which it computes."""
        return tuple(name for name in FRAMEWORKS if hasattr(self, name))

    def part(self, framework: str, model: ModelConfig, place: DeviceAndDtype) -> Any:
        """What it does in one of its frameworks: the method of that name."""
        return getattr(self, framework)(model, place)

    @property
    def transform(self) -> Transform | None:
        """What is done to x; None of tokens, and where the user's own part does it."""
        return None

    @property
    def transforms(self) -> Transforms | None:
        """What is done to each input of a model that is called with several."""
        return None

    @property
    def main_input(self) -> str:
        """The field that the task takes for x."""
        return "x"

    @property
    def input_fields(self) -> dict[str, Field]:
        """What a model gets of a sample: its inputs; x; or without an x all fields: tokens."""
        fields = dict(self.fields)
        names = ["x"] if self.transforms is None else list(self.transforms.each)
        return {name: fields[name] for name in names} if set(names) <= fields.keys() else fields

    @property
    def masks(self) -> Mapping[str, int | None]:
        """The fields of pixels that move with x, and the label of what is outside of the image."""
        return {}

    @property
    def class_label(self) -> str | None:
        """The field with the class of a sample, which is said by the largest of the outputs."""
        return None

    @property
    def mask_label(self) -> str | None:
        """The field with the class of each pixel of x, which is said by the largest of the pixel's
        outputs."""
        return None

    @property
    def drawn(self) -> Field | None:
        """The tokens that a model of the task draws one after the other."""
        return None

    @property
    def takes_lengths(self) -> bool:
        """Whether samples of different lengths need no model and no loss of the user's."""
        return False

    @property
    def takes_split_logits(self) -> bool:
        """Whether its loss is of logits that are cut over ranks by class, too."""
        return False

    @property
    def has_user_loss(self) -> bool:
        """Whether its loss is a function of a script."""
        return False

    @property
    def examples(self) -> Batch | None:
        """Some samples, to try functions of the user's with, where the task calls any."""
        return None

    @property
    def gathered(self) -> tuple[str, ...]:
        """Names of what an evaluation gathers from all ranks besides the sums, as Concatenated."""
        return ()

    @property
    def counted(self) -> str:
        """The sum that metrics are means over."""
        return "count"

    @property
    def notes(self) -> Sequence[str]:
        """Lines for the header."""
        return ()

    def notes_on_data(self, train: Source, val: Source, has_given_stats: bool) -> list[str]:
        """Lines for the header about data that may not be what was meant.

        has_given_stats: whether the user says mean and deviation of images.
        """
        return []

    @property
    def details(self) -> str:
        """The data in words, where the summary is short for an image's shape."""
        return self.summary

    def rows(self, is_softmax: bool, class_names: Sequence[str] | None) -> Rows:
        """How outputs become rows of the table of a prediction.

        is_softmax: whether outputs are logits of classes, of which softmax makes probabilities.
        """
        return rows_of_numbers()


# what an object of the user's needs, to be a task
MEMBERS = [name for name in vars(Task) if name in Task.__abstractmethods__]


class Each(NamedTuple):
    """Loss and sums of each sample of a batch, as arrays of the framework."""

    # (n,), what is learned from, unweighted; its sum over all samples over the sum of weight() is
    # the loss
    loss: Any
    terms: dict[str, Any]  # (n,) or (n, length) for each of Task.sums but "loss"
    parts: Mapping[str, Concatenated] = {}  # of an evaluation alone, for each of Task.gathered


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


class TaskPart(Protocol):
    """What a task does in one framework. `batch` has the fields of Task.fields, augmented, and the
    further keys of core/arrays.py."""

    def inputs(self, batch: Any, /) -> Any:
        """What the model is called with, (n, ...); in torch a dict of them where it has several
        inputs."""

    def each(self, outputs: Any, batch: Any, /, training: bool) -> Each:
        """Loss and sums of each sample, in the weights' own number type; they follow from the
        sample and its outputs alone."""


def outputs_of(part: TaskPart) -> Callable[[Any], Any]:
    """What makes of a model's outputs those that each() takes: the outputs themselves, unless the
    part has an outputs_of()."""
    return getattr(part, "outputs_of", lambda found: found)


def counts_exactly(part: TaskPart) -> bool:
    """Whether its terms are whole numbers that are too large for 32 bits once they are added up
    over a data set."""
    return bool(getattr(part, "counts_exactly", False))


class NumpyPart(TaskPart, Protocol):
    """A task's part in NumPy, which has no gradients of its own."""

    def gradient(self, outputs: np.ndarray, batch: Any, /) -> np.ndarray:
        """d(loss of each sample) / d(outputs), (n, outputs), in training."""


class DeviceAndDtype(NamedTuple):
    """Where a part computes, as its framework names it."""

    dtype: Any  # of the model's numbers
    device: Any = None


def part_of(task: Task, framework: str, config: Config, place: DeviceAndDtype) -> Any:
    """What a task does in a framework. Raises UserError where it has no part for it."""
    if framework not in task.frameworks:
        what = f"task.name={task.name} does not compute with framework={config.framework}"
        raise UserError(
            what, config.where("framework"), f"framework={' or framework='.join(task.frameworks)}"
        )
    return task.part(framework, config.model, place)


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
    tokens: int | None = task.sizes.get("context")
    return tokens


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
