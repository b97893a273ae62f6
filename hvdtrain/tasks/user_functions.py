"""User-defined functions: the loss of each sample, and metrics computed from sums over samples."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvdtrain.core.extras import library_metrics
from hvdtrain.core.metrics import Better, Concatenated
from hvdtrain.core.own_line import own_line
from hvdtrain.data.field import Padding
from hvdtrain.errors import BUG, UserError, exit_code_of, first_line

WHERE = "hvdtrain.train(), metrics"


class UserLoss(NamedTuple):
    """The user's loss function, one value per sample."""

    # (outputs, batch) -> (n,); a torch.nn.Module moves to the model's device
    of: Callable[[Any, Mapping[str, Any]], Any]
    facts: dict[str, Any]  # plain values that a checkpoint keeps
    ignore: int | None = (
        None  # targets y with this value have no loss, and the mean is over the other targets
    )


@dataclass(frozen=True)
class OwnMetric:
    """A metric from a function (outputs, batch).

    Without `length` the function returns a value for each sample (n,), whose mean is the metric, or
    (sum, count), whose sums are divided. With `length` it returns `length` numbers for each sample
    (n, length), and the metric is `of` applied to their sum over all samples, float64 (length,).
    """

    function: Callable[[Any, Mapping[str, Any]], Any]
    better: Better
    length: int = 0
    of: Callable[[np.ndarray], float] | None = None
    percent: bool = False  # how reports show it


@dataclass(frozen=True)
class GatheredMetric:
    """A metric computed from what a function (outputs, batch) returns for each batch of an
    evaluation; it does not exist in training."""

    function: Callable[[Any, Mapping[str, Any]], Concatenated]
    better: Better
    of: Callable[[Concatenated], float]  # computes the metric from all ranks' parts, in rank order

    length: ClassVar[int] = -1  # it has no vector of sums
    percent: ClassVar[bool] = False


class LibraryFunction:
    """The function of a library's metric, which may not support padded targets."""

    def refuse_padding(self, padding: Padding) -> None:
        """Raises UserError if the metric would compare outputs with padding."""
        raise NotImplementedError


UserMetrics = Mapping[str, OwnMetric | GatheredMetric]


def read_metrics(given: Mapping[str, Any] | None) -> dict[str, OwnMetric | GatheredMetric]:
    """Reads metrics such as {"mae": (function, "min")}, {"f1": (a torchmetrics object, "max")} or
    {"recall": OwnMetric(...)}. Raises UserError for anything else."""
    if given is not None and not isinstance(given, Mapping):
        raise UserError(
            f"metrics is a {type(given).__name__}", WHERE, 'a dict: {"mae": (function, "min")}'
        )
    return {name: _read(str(name), one) for name, one in (given or {}).items()}


def _read(name: str, given: Any) -> OwnMetric | GatheredMetric:
    fix = (
        f'{{"{name}": (function, "max")}} where higher is better, else "min"; or hvdtrain.OwnMetric'
    )
    if isinstance(given, tuple) and given:
        _refuse_no_metric(name, given[0])
    if isinstance(given, tuple) and len(given) in (2, 3) and _is_library_metric(given[0]):
        given = _of_library(name, *given)
    if isinstance(given, tuple) and len(given) == 2:
        given = OwnMetric(*given)
    if not isinstance(given, (OwnMetric, GatheredMetric)):
        what = "has no direction" if callable(given) else f"is a {type(given).__name__}"
        raise UserError(f"metric {name} {what}", WHERE, fix)
    if not callable(given.function) or given.better not in ("max", "min"):
        raise UserError(
            f"metric {name} is ({type(given.function).__name__}, {given.better!r})", WHERE, fix
        )
    if isinstance(given, OwnMetric) and (
        bool(given.length) != (given.of is not None) or given.length < 0
    ):
        what = f"metric {name} has length={given.length} and of={given.of}"
        raise UserError(
            what,
            WHERE,
            "both: `length` numbers for each sample, and of(their sums); or neither: the mean of "
            "one number",
        )
    return given


def _refuse_no_metric(name: str, found: Any) -> None:
    """Raises UserError for a class instead of an object, and for a collection of metrics."""
    if isinstance(found, type):
        raise UserError(
            f"metric {name} is the class {found.__name__}",
            WHERE,
            f"an object of it: {found.__name__}(...)",
        )
    if any(
        kind.__name__ == "MetricCollection" and kind.__module__.startswith("torchmetrics.")
        for kind in type(found).__mro__
    ):
        what = f"metric {name} is a MetricCollection, which returns several numbers"
        raise UserError(what, WHERE, "add each of its metrics to `metrics` under its own name")


def _is_library_metric(thing: Any) -> bool:
    """Whether an object is a torchmetrics metric; does not import torchmetrics."""
    return any(
        kind.__name__ == "Metric" and kind.__module__ == "torchmetrics.metric"
        for kind in type(thing).__mro__
    )


def _of_library(
    name: str, metric: Any, better: Better, inputs: Any = None
) -> OwnMetric | GatheredMetric:
    module = library_metrics()
    if module is None:
        what = f"metric {name} belongs to torchmetrics, which needs an extra of hvdtrain"
        fix = "hvdtrain.OwnMetric; `hvdtrain extras` lists the installed extras"
        raise UserError(what, WHERE, fix)
    found: OwnMetric | GatheredMetric = importlib.import_module(module).metric_of(
        name, metric, better, inputs, WHERE
    )
    return found


def summed(metrics: UserMetrics) -> dict[str, OwnMetric]:
    """Returns the metrics that are computed from sums."""
    return {name: metric for name, metric in metrics.items() if isinstance(metric, OwnMetric)}


def of_parts(metrics: UserMetrics) -> dict[str, GatheredMetric]:
    """Returns the metrics that are computed from Concatenated values."""
    return {name: metric for name, metric in metrics.items() if isinstance(metric, GatheredMetric)}


def parts_of(
    metrics: UserMetrics, outputs: Any, batch: Mapping[str, Any]
) -> dict[str, Concatenated]:
    """Returns the values of a batch to gather, by the names of Measured.gathered."""
    return {
        f"{name}_parts": metric.function(outputs, batch)
        for name, metric in of_parts(metrics).items()
    }


def refuse_parts(metrics: UserMetrics) -> None:
    """Raises UserError for a metric that needs gathered values, which a framework with compiled
    functions does not support."""
    if found := of_parts(metrics):
        what = (
            f"metric {next(iter(found))} belongs to torchmetrics, which computes on torch tensors"
        )
        raise UserError(what, WHERE, "framework=torch, or a function of arrays")


def terms_of(
    metrics: UserMetrics,
    outputs: Any,
    batch: Mapping[str, Any],
    samples: int,
    rows: Callable[[Any, int, bool], Any],
) -> dict[str, Any]:
    """Computes the terms of Measured.sums. rows(value, samples, whole): converts a value to an
    array of the framework.

    Raises UserError if a function fails, or if the shape of its result is not what the metric
    declares.
    """
    terms: dict[str, Any] = {}
    for name, metric in summed(metrics).items():
        with _named(name):
            value = metric.function(outputs, batch)
            if metric.length:
                terms[f"{name}_sum"] = _checked(
                    name, rows(value, samples, False), (samples, metric.length)
                )
            elif isinstance(value, tuple) and len(value) == 2:
                both = (_checked(name, rows(part, samples, True), (samples,)) for part in value)
                terms[f"{name}_sum"], terms[f"{name}_count"] = both
            else:
                found = _checked(name, rows(value, samples, False), (samples,))
                terms[f"{name}_sum"], terms[f"{name}_count"] = found, found == found  # noqa: PLR0124 (one of each: a NaN is in the sum)
    return terms


def terms_of_no_samples(metrics: UserMetrics, empty: Any) -> dict[str, Any]:
    """Returns the terms of a batch without samples; no function is called. empty: an array (0,) of
    the framework."""
    terms: dict[str, Any] = {}
    for name, metric in summed(metrics).items():
        terms[f"{name}_sum"] = (
            empty.reshape(0, 1).repeat(1, metric.length) if metric.length else empty
        )
        if not metric.length:
            terms[f"{name}_count"] = empty
    return terms


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Converts exceptions of a metric's function to a UserError with the metric's name, except if
    memory is exhausted."""
    try:
        yield
    except Exception as error:
        if exit_code_of(error) != BUG:
            raise
        what = f"metric {name} fails: {type(error).__name__}: {first_line(error)}"
        fix = (
            "correct it there; the function gets the model's outputs and the batch, a dict of "
            "fields"
        )
        raise UserError(what, f"{WHERE}; {own_line(error)}", fix) from error


def _checked(name: str, found: Any, shape: tuple[int, ...]) -> Any:
    if tuple(found.shape) != shape:
        what = f"metric {name} returns {tuple(found.shape)}, not {shape}: one value for each sample"
        fix = (
            "(n,), or the pair (sum, count); an hvdtrain.OwnMetric of length k (n, k)"
            if not found.ndim
            else "one row for each sample"
        )
        raise UserError(what, WHERE, fix)
    return found
