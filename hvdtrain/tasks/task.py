"""Task: the base class of tasks, which each task's build() returns, and TaskPart, its part in one
framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Concatenated, Metric
from hvdtrain.data.field import Field
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.tasks.transform import Transform, Transforms

if TYPE_CHECKING:
    from hvdtrain.tasks.rows import Rows

FRAMEWORKS = ("torch", "jax", "numpy")


class Task(ABC):
    """The task for which a model is trained: its data fields, loss and metrics. It is the same on
    all ranks, knows no rank, and does not change.

    Every task implements the abstract members. The other members default to the simplest case; a
    task overrides them by class attributes or properties. The methods torch(), jax() and numpy()
    return its part in a framework; a task implements the methods of the frameworks that it
    supports.
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
        """The parameters that models are built from, as JSON values by name: {"shape": (8, 8, 1),
        "outputs": 10}."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """A summary of the data, for people: 28x28x1, 10 classes."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """The reported metrics. The first is "loss", the mean training loss of the samples."""

    @property
    @abstractmethod
    def objective(self) -> str:
        """The name of the metric that stop.target, checkpoint.keep_best and log.targets use."""

    @property
    @abstractmethod
    def sums(self) -> Mapping[str, int]:
        """The sums that metrics are computed from, by name: 0 for a number, else the length of a
        vector. They include "loss", but not "count"."""

    @property
    @abstractmethod
    def sample_weight(self) -> int | None:
        """The weight() of one sample if it is the same for all samples, else None."""

    @abstractmethod
    def weight(self, batch: Batch) -> float:
        """Returns the divisor that makes the summed loss of these samples a mean: their number,
        their number of tokens, or a sum of weights. The batch is on the host."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Returns JSON values from which the task's restore() recreates it. A checkpoint keeps
        them, and a resume compares them."""

    @abstractmethod
    def outputs(self, samples: int) -> str:
        """Describes a model's outputs for this number of samples, for messages: "logits (2,
        10)"."""

    @abstractmethod
    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        """Whether a model with outputs of this shape for this number of samples can learn the
        task."""

    @property
    def frameworks(self) -> tuple[str, ...]:
        """The frameworks that the task supports."""
        return tuple(name for name in FRAMEWORKS if hasattr(self, name))

    def part(self, framework: str, model: ModelConfig, place: DeviceAndDtype) -> Any:
        """Returns the task's part in a framework, by calling the method of that name."""
        return getattr(self, framework)(model, place)

    @property
    def transform(self) -> Transform | None:
        """The transform of x; None for tokens, or if the user's part applies its own."""
        return None

    @property
    def transforms(self) -> Transforms | None:
        """The transform of each input of a model with several inputs."""
        return None

    @property
    def main_input(self) -> str:
        """The field that the task uses as x."""
        return "x"

    @property
    def input_fields(self) -> dict[str, Field]:
        """The fields that a model gets: its inputs, x, or without an x all fields, as tokens."""
        fields = dict(self.fields)
        names = ["x"] if self.transforms is None else list(self.transforms.each)
        return {name: fields[name] for name in names} if set(names) <= fields.keys() else fields

    @property
    def masks(self) -> Mapping[str, int | None]:
        """The mask fields that are augmented with x, and the label for pixels outside the image."""
        return {}

    @property
    def class_label(self) -> str | None:
        """The field with the class of a sample; the largest output predicts it."""
        return None

    @property
    def mask_label(self) -> str | None:
        """The field with the class of each pixel of x; the pixel's largest output predicts it."""
        return None

    @property
    def drawn(self) -> Field | None:
        """The field of tokens that a model of the task generates one by one."""
        return None

    @property
    def takes_lengths(self) -> bool:
        """Whether variable-length samples work without a user's model and loss."""
        return False

    @property
    def takes_split_logits(self) -> bool:
        """Whether the loss also accepts logits that are partitioned among ranks by class."""
        return False

    @property
    def has_user_loss(self) -> bool:
        """Whether the loss is a function of the user's script."""
        return False

    @property
    def examples(self) -> Batch | None:
        """Some samples to try the user's functions on, if the task calls any."""
        return None

    @property
    def gathered(self) -> dict[str, Callable[[Concatenated], float]]:
        """The values that an evaluation gathers from all ranks besides the sums, by name, and the
        functions that it applies to them."""
        return {}

    @property
    def counted(self) -> str:
        """The name of the sum that metrics are divided by."""
        return "count"

    @property
    def notes(self) -> Sequence[str]:
        """Lines for the header."""
        return ()

    def notes_on_data(self, train: Source, val: Source, has_given_stats: bool) -> list[str]:
        """Returns header lines about data that may not be as intended.

        has_given_stats: whether the user sets the mean and deviation of images.
        """
        return []

    @property
    def details(self) -> str:
        """The data in words; it spells out the image shape that the summary abbreviates."""
        return self.summary

    @property
    def map_names(self) -> tuple[str, ...]:
        """The names of the channels of y, if it has numbers for each pixel of x, which augmentation
        does not move; else empty."""
        return ()

    def as_maps(self, values: np.ndarray) -> np.ndarray:
        """Converts targets or outputs (n, ...) to maps (n, C, H, W), in the order of map_names."""
        raise NotImplementedError(f"task.name={self.name} has no maps")

    def why_without(self, size: str) -> tuple[str, str]:
        """Returns why `sizes` lacks a size that a model is built from, and what to do; empty if
        the task never has it."""
        return "", ""

    def rows(self, is_softmax: bool, class_names: Sequence[str] | None) -> Rows:
        """Returns how outputs become rows of a prediction table.

        is_softmax: whether outputs are logits of classes, which softmax turns into probabilities.
        """
        from hvdtrain.tasks.rows import rows_of_numbers

        return rows_of_numbers()


# the members that a user's object needs to be a task
MEMBERS = [name for name in vars(Task) if name in Task.__abstractmethods__]


class Each(NamedTuple):
    """Loss and sums of each sample of a batch, as arrays of the framework."""

    # (n,), the unweighted training loss; its sum over all samples divided by the sum of weight() is
    # the loss
    loss: Any
    terms: dict[str, Any]  # (n,) or (n, length) for each of Task.sums except "loss"
    parts: Mapping[str, Concatenated] = {}  # only in an evaluation, for each of Task.gathered


def wrong_shapes(task: Task, each: Any, samples: int) -> str:
    """Describes how a part's result for this number of samples differs from Task.sums; empty if it
    does not."""
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
    """The part of a task in one framework. `batch` contains the augmented fields of Task.fields and
    the further keys of core/arrays.py."""

    def inputs(self, batch: Any, /) -> Any:
        """Returns the model's input, (n, ...); in torch, a dict if it has several inputs."""

    def each(self, outputs: Any, batch: Any, /, training: bool) -> Each:
        """Returns the loss and sums of each sample, in the dtype of the weights. They depend only
        on the sample and its outputs."""


def outputs_of(part: TaskPart) -> Callable[[Any], Any]:
    """Returns the function that converts a model's outputs to the form that each() expects: the
    part's outputs_of(), or the identity."""
    return getattr(part, "outputs_of", lambda found: found)


def counts_exactly(part: TaskPart) -> bool:
    """Whether the part's terms are integers whose sum over a data set may overflow 32 bits."""
    return bool(getattr(part, "counts_exactly", False))


class NumpyPart(TaskPart, Protocol):
    """A task's part in NumPy, which needs a hand-written gradient."""

    def gradient(self, outputs: np.ndarray, batch: Any, /) -> np.ndarray:
        """Returns d(loss of each sample) / d(outputs) in training, (n, outputs)."""


class DeviceAndDtype(NamedTuple):
    """The dtype and device of a part, as its framework names them."""

    dtype: Any  # of the model's numbers
    device: Any = None
    parts: Any = None  # the module with the classes of parts, if they belong to the framework


def part_of(task: Task, framework: str, config: Config, place: DeviceAndDtype) -> Any:
    """Returns the task's part in a framework. Raises UserError if the task does not support it."""
    if framework not in task.frameworks:
        what = f"task.name={task.name} does not support framework={config.framework}"
        raise UserError(
            what, config.where("framework"), f"framework={' or framework='.join(task.frameworks)}"
        )
    return task.part(framework, config.model, place)


def is_users_model(model: ModelConfig) -> bool:
    """Whether the model is the user's class, function or object rather than one of hvdtrain's."""
    return is_dotted(model.name)


def find_field(source: Source, name: str, task: str, where: str, expected: str) -> Field:
    """Returns a field that a task needs. Raises UserError if the data do not have it."""
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
    """Raises UserError if a field of a sample has size 0."""
    if 0 in field.shape:
        raise UserError(
            f"{name} is {field}: it contains no numbers",
            where,
            "one number or more for each sample",
        )


def tokens_of_sample(task: Task) -> int | None:
    """Returns the number of tokens of a sample, or None if it varies or samples have no tokens."""
    if any(field.padding is not None for field in task.fields.values()):
        return None
    tokens: int | None = task.sizes.get("context")
    return tokens


def samples_of(task: Task) -> str:
    """Returns the word for samples in printed lines: "images" or "samples"."""
    return (
        "images"
        if any(field.dtype == "uint8" and len(field.shape) == 3 for field in task.fields.values())
        else "samples"
    )


def objective(task: Task) -> Metric:
    """Returns the metric named by Task.objective."""
    return next(metric for metric in task.metrics if metric.name == task.objective)
