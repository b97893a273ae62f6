"""Tasks with user-defined functions. OwnLoss has a loss of the model's outputs and the batch;
Measured adds metrics to any task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.config.plugins import is_torch_module
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Concatenated, Metric, Sums, ratio
from hvdtrain.data.field import Field, field_of_facts
from hvdtrain.data.source import Source, arrays_in_memory
from hvdtrain.errors import UserError, nearest
from hvdtrain.tasks.around import AroundTask
from hvdtrain.tasks.task import DeviceAndDtype, Task, TaskPart, find_field, is_users_model
from hvdtrain.tasks.transform import ColumnStats, Transform, input_stats, transform_of_facts
from hvdtrain.tasks.user_functions import (
    WHERE,
    GatheredMetric,
    LibraryFunction,
    OwnMetric,
    UserLoss,
    UserMetrics,
    of_parts,
    summed,
)


@dataclass(frozen=True)
class OwnLoss(Task):
    """The task of a user-defined loss: a function of the model's outputs for x and of the batch."""

    configured_name: str
    fields_of_data: Mapping[str, Field]
    stats: ColumnStats  # of Transform
    loss: UserLoss
    own_outputs: int | None  # number of outputs of a built-in model, if known
    examples_of_data: Batch

    objective = "loss"
    has_user_loss = True

    @property
    def name(self) -> str:
        return self.configured_name

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.fields_of_data

    @property
    def examples(self) -> Batch:
        return self.examples_of_data

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "shape": self.fields["x"].shape or (1,),
            **({"outputs": self.own_outputs} if self.own_outputs else {}),
        }

    @property
    def summary(self) -> str:
        return ", ".join(f"{name} {field}" for name, field in self.fields.items())

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric(
                "loss", ratio("loss", "count" if self.loss.ignore is None else "targets"), "min"
            ),
        )

    @property
    def sums(self) -> dict[str, int]:
        return {"loss": 0} if self.loss.ignore is None else {"loss": 0, "targets": 0}

    @property
    def sample_weight(self) -> int | None:
        return 1 if self.loss.ignore is None else None

    def weight(self, batch: Batch) -> int:
        if self.loss.ignore is None:
            return len(next(iter(batch.values())))
        return int(np.count_nonzero(batch["y"] != self.loss.ignore))

    @property
    def transform(self) -> Transform:
        return Transform(self.fields["x"], *self.stats)

    def facts(self) -> dict[str, Any]:
        fields = {name: field.facts() for name, field in self.fields.items()}
        stats = {"mean": self.stats.mean.tolist(), "std": self.stats.std.tolist()}
        is_changed = self.transform.is_of_images or self.transform.is_standardized
        return {"fields": fields, "loss": self.loss.facts, **(stats if is_changed else {})}

    def outputs(self, samples: int) -> str:
        return f"outputs ({samples}, ...), a row for each sample"

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        return len(found) >= 1 and found[0] == samples

    def torch(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        from hvdtrain.tasks.torch import TorchInputs
        from hvdtrain.tasks.torch_functions import TorchFunctions

        _refuse_keys_of_classification(model)
        return TorchFunctions(
            self.loss, TorchInputs(self.transform, place, is_users_model(model)), place
        )

    def jax(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        _refuse_keys_of_classification(model)
        return place.parts.JaxFunctions(
            self.loss,
            place.parts.JaxInputs(self.transform, place, is_users_model(model)),
            self.fields,
            place,
        )


def own_loss(
    name: str,
    train: Source,
    val: Source,
    where: str,
    loss: Any,
    outputs: int | None,
    standardize: bool | None = None,
    users_model: bool = False,
) -> OwnLoss:
    """Builds the task of a user-defined loss; standardize, users_model: see input_stats().

    Raises UserError if the data have no x, if the sets do not match, or if the loss of a batch is
    not a mean over samples."""
    find_field(train, "x", name, where, "which the model is called with")
    for field, kind in train.fields.items():
        other = val.fields.get(field)
        if other is None or other.shape != kind.shape or other.dtype != kind.dtype:
            what = (
                f"{field} is {kind} in the training set, {other or 'missing'} in the validation set"
            )
            raise UserError(what, where, "both sets need the same fields")
    stats = input_stats(train, standardize, users_model)
    fields = dict(train.fields)
    return OwnLoss(
        name,
        fields,
        stats,
        _loss(loss, (train, val), where),
        _own_outputs(fields, outputs),
        examples_of(train),
    )


def without_loss(facts: Mapping[str, Any], outputs: int | None) -> OwnLoss:
    """Rebuilds a task from OwnLoss.facts() for predictions, which do not call the loss. Raises
    KeyError, TypeError, ValueError."""
    fields = {name: field_of_facts(found) for name, found in facts["fields"].items()}
    transform = transform_of_facts(facts)
    loss = UserLoss(lambda outputs, batch: outputs, {})
    return OwnLoss(
        "prediction",
        fields,
        ColumnStats(transform.mean, transform.std),
        loss,
        _own_outputs(fields, outputs),
        {},
    )


def with_inputs_of(task: Task, facts: Mapping[str, Any]) -> Task:
    """Returns the task of a script's loss, with or without metrics, with the inputs of a
    checkpoint. Raises what without_loss() raises."""
    if isinstance(task, Measured):
        inner = with_inputs_of(task.task, facts)
        return Measured(inner, task.own, task.objective, task.examples)
    assert isinstance(task, OwnLoss), type(task)
    transform = transform_of_facts(facts)
    return replace(task, stats=ColumnStats(transform.mean, transform.std))


def _own_outputs(fields: Mapping[str, Field], outputs: int | None) -> int | None:
    """Returns the number of outputs of a built-in model: the given one, or the size of the
    targets."""
    y = fields.get("y")
    if outputs is not None or y is None:
        return outputs
    return y.values or (math.prod(y.shape) if np.dtype(y.dtype).kind == "f" else None)


def examples_of(source: Source) -> Batch:
    """Returns at most four samples, evenly spaced from the first to the last."""
    return source.read(np.unique(np.linspace(0, len(source) - 1, 4).astype(np.int64)))


def _loss(loss: Any, sources: tuple[Source, Source], where: str) -> UserLoss:
    """Returns the loss function. Raises UserError if it does not return one loss per sample."""
    if is_torch_module(loss):
        from hvdtrain.tasks.loss_modules import of_torch_module

        def never(value: int) -> bool:
            return all(_never(source, value) for source in sources)

        return of_torch_module(
            loss, where, sources[0].fields, never, lambda label: _sample_of(label, *sources)
        )
    if not callable(loss):
        raise UserError(
            f"loss is a {type(loss).__name__}",
            where,
            "a function loss(outputs, batch) -> (n,), or a loss of torch.nn",
        )
    return UserLoss(loss, {"function": getattr(loss, "__qualname__", type(loss).__qualname__)})


def _never(source: Source, value: int) -> bool:
    """Whether it is known that no target has this value, so that all samples have the same
    weight."""
    field = source.fields["y"]
    if field.padding is not None and value == field.padding.value:
        return False
    if np.dtype(field.dtype).kind == "f" or (field.values and not 0 <= value < field.values):
        return True
    arrays = arrays_in_memory(source)
    return arrays is not None and not (arrays["y"] == value).any()


def _sample_of(label: int, train: Source, val: Source) -> str:
    """Names the first sample with a label for messages: sample 3 of the training set."""
    for name, source in (("training", train), ("validation", val)):
        labels = source.known_labels()
        if labels is not None and (labels == label).any():
            return f"sample {int(np.argmax(labels == label))} of the {name} set"
    return "a sample"


def _refuse_keys_of_classification(model: ModelConfig) -> None:
    for key, default in (("label_smoothing", 0.0), ("loss", "cross_entropy")):
        if getattr(model, key) != default:
            what = f"model.{key} needs task.name=classification, but this job has a custom loss"
            raise UserError(
                what, model.where(key), f"leave model.{key} out, or loss= of hvdtrain.train()"
            )


class Measured(AroundTask):
    """Adds user-defined metrics to a task. The objective is one of them, or one of the task's."""

    def __init__(
        self, task: Task, metrics: UserMetrics, objective: str | None, examples: Batch
    ) -> None:
        super().__init__(task)
        self.own = dict(metrics)
        self._examples = examples
        self._objective = objective or task.objective

    @property
    def objective(self) -> str:
        return self._objective

    @property
    def examples(self) -> Batch:
        return self._examples

    def part(self, framework: str, model: ModelConfig, place: DeviceAndDtype) -> Any:
        with_metrics = self._measured(framework, place)
        return with_metrics(self.task.part(framework, model, place), self.own, place)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (*self.task.metrics, *(_metric(name, own) for name, own in self.own.items()))

    @property
    def sums(self) -> dict[str, int]:
        own = [(f"{name}_sum", one.length) for name, one in summed(self.own).items()]
        counts = [(f"{name}_count", 0) for name, one in summed(self.own).items() if not one.length]
        return {**self.task.sums, **dict(own), **dict(counts)}

    @property
    def gathered(self) -> dict[str, Callable[[Concatenated], float]]:
        own = {f"{name}_parts": metric.of for name, metric in of_parts(self.own).items()}
        return {**self.task.gathered, **own}

    @property
    def notes(self) -> list[str]:
        names = list(of_parts(self.own))
        what = "of evaluations alone, which gather what they keep of every sample on rank 0"
        line = f"metric{'s' if len(names) > 1 else ''} {', '.join(names)}: {what}"
        return [*self.task.notes, *([line] if names else [])]

    def facts(self) -> dict[str, Any]:
        """Returns the task's facts, with the direction and length of each metric."""
        return {
            **self.task.facts(),
            "metrics": {name: [one.better, one.length] for name, one in self.own.items()},
        }

    def _measured(self, framework: str, place: DeviceAndDtype) -> Any:
        if framework == "torch":
            from hvdtrain.tasks.torch_functions import TorchMeasured

            return TorchMeasured
        if framework == "jax":
            return place.parts.JaxMeasured
        raise UserError(
            f"framework={framework} does not support custom metrics (metrics=, task.name)",
            WHERE,
            "framework=torch or framework=jax",
        )


def inside_measured(task: Task, wrap: Callable[[Task], Any]) -> Task:
    """Returns the wrapped task; of a task with metrics, wraps the one inside. with_names() of the
    wrapper renames fields as it does."""
    if not isinstance(task, Measured):
        wrapped: Task = wrap(task)
        return wrapped
    inner = wrap(task.task)
    return Measured(inner, task.own, task.objective, inner.with_names(task.examples))


def measured(task: Task, metrics: UserMetrics, objective: str | None, examples: Batch) -> Task:
    """Returns the task with metrics. examples: some samples to try the functions on.

    Raises UserError if the task already has a metric of that name, a library metric would count
    padding, or the objective is not a metric.
    """
    _refuse_padded_targets(task, metrics)
    taken = {metric.name for metric in task.metrics}
    if both := taken & metrics.keys():
        raise UserError(
            f"task.name={task.name} already has a metric {min(both)}", WHERE, "another name"
        )
    names = [*taken, *metrics]
    if objective is not None and objective not in names:
        raise UserError(
            f"objective={objective} is not a metric",
            "hvdtrain.train(), objective",
            nearest(objective, sorted(names)),
        )
    if not metrics and objective in (None, task.objective):
        return task
    return Measured(task, metrics, objective, examples)


def _refuse_padded_targets(task: Task, metrics: UserMetrics) -> None:
    padding = y.padding if (y := task.fields.get("y")) is not None else None
    for metric in metrics.values():
        if padding is not None and isinstance(metric.function, LibraryFunction):
            metric.function.refuse_padding(padding)


def _metric(name: str, own: OwnMetric | GatheredMetric) -> Metric:
    if isinstance(own, GatheredMetric):
        of_all = own.of

        def of_parts_or_value(sums: Sums) -> float:
            found = sums.get(f"{name}_parts", Concatenated())
            # allreduce_sums() has already computed it
            return of_all(found) if isinstance(found, Concatenated) else float(found)

        return Metric(name, of_parts_or_value, own.better)
    if not own.length:
        return Metric(name, ratio(f"{name}_sum", f"{name}_count"), own.better, percent=own.percent)
    of = own.of

    def value(sums: Sums) -> float:
        assert of is not None
        return float(of(np.asarray(sums[f"{name}_sum"], np.float64))) if sums["count"] else math.nan

    return Metric(name, value, own.better, percent=own.percent)
