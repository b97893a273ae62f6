"""Functions of the user's: the loss of each sample, and a metric, which is made of the sum of what it gives for each sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.core.metrics import Better
from hvdtrain.errors import UserError
from hvdtrain.tasks.library_metrics import SumsOfMetric, is_library_metric

WHERE = "hvdtrain.train(), metrics"


class Loss(NamedTuple):
    """What is learned from, of each sample."""

    of: Callable[[Any, Mapping[str, Any]], Any]  # (outputs, batch) -> (n,); a torch.nn.Module moves to the model's device
    facts: dict[str, Any]  # its plain values, which a checkpoint keeps
    ignore: int | None = None  # targets y of this value have no loss, and the mean is over the others


def is_torch_module(thing: Any) -> bool:
    """Whether it is a torch.nn.Module, without importing torch."""
    return any(kind.__module__ == "torch.nn.modules.module" and kind.__name__ == "Module" for kind in type(thing).__mro__)


@dataclass(frozen=True)
class OwnMetric:
    """How well a model does, of a function (outputs, batch).

    Without `length` it gives a value of each sample (n,), whose mean is the metric, or (sum, count), whose sums are divided. With `length`
    it gives a row of so many numbers of each sample (n, length), and the metric is `of` of their sum over all samples, float64 (length,).
    """

    function: Callable[[Any, Mapping[str, Any]], Any]
    better: Better
    length: int = 0
    of: Callable[[np.ndarray], float] | None = None
    percent: bool = False  # how reports show it


def read_metrics(given: Mapping[str, Any] | None) -> dict[str, OwnMetric]:
    """{"mae": (function, "min")}, {"f1": (one of torchmetrics, "max")} or {"recall": OwnMetric(...)}. Raises UserError for all else."""
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f"metrics is a {type(given).__name__}", WHERE, 'a dict: {"mae": (function, "min")}')
    return {name: _read(str(name), one) for name, one in (given or {}).items()}


def _read(name: str, given: Any) -> OwnMetric:
    fix = f'{{"{name}": (function, "max")}} where higher is better, else "min"; or hvdtrain.OwnMetric'
    if isinstance(given, tuple) and len(given) in (2, 3) and is_library_metric(given[0]):
        sums = SumsOfMetric(name, given[0], given[2] if len(given) == 3 else None, WHERE)
        given = OwnMetric(sums, given[1], sums.length, sums.compute)
    if isinstance(given, tuple) and len(given) == 2:
        given = OwnMetric(*given)
    if not isinstance(given, OwnMetric):
        what = "has no direction" if callable(given) else f"is a {type(given).__name__}"
        raise UserError(f"metric {name} {what}", WHERE, fix)
    if not callable(given.function) or given.better not in ("max", "min"):
        raise UserError(f"metric {name} is ({type(given.function).__name__}, {given.better!r})", WHERE, fix)
    if bool(given.length) != (given.of is not None) or given.length < 0:
        what = f"metric {name} has length={given.length} and of={given.of}"
        raise UserError(what, WHERE, "both: length numbers of each sample, and of(their sums); or neither: the mean of one number")
    return given


def terms_of(
    metrics: Mapping[str, OwnMetric], outputs: Any, batch: Mapping[str, Any], samples: int, rows: Callable[[Any, int, bool], Any]
) -> dict[str, Any]:
    """The terms of the sums of Measured. rows(value, samples, whole): it as an array of the framework.

    Raises UserError where a function gives another shape than its metric declares.
    """
    terms: dict[str, Any] = {}
    for name, metric in metrics.items():
        value = metric.function(outputs, batch)
        if metric.length:
            terms[f"{name}_sum"] = _checked(name, rows(value, samples, False), (samples, metric.length))
        elif isinstance(value, tuple) and len(value) == 2:
            both = (_checked(name, rows(part, samples, True), (samples,)) for part in value)
            terms[f"{name}_sum"], terms[f"{name}_count"] = both
        else:
            found = _checked(name, rows(value, samples, False), (samples,))
            terms[f"{name}_sum"], terms[f"{name}_count"] = found, found == found  # noqa: PLR0124 (one of each: a NaN is in the sum)
    return terms


def _checked(name: str, found: Any, shape: tuple[int, ...]) -> Any:
    if tuple(found.shape) != shape:
        what = f"metric {name} gives {tuple(found.shape)}, not {shape}: a value of each sample"
        fix = "(n,), or the pair (sum, count); an hvdtrain.OwnMetric of length k (n, k)" if not found.ndim else "one row for each sample"
        raise UserError(what, WHERE, fix)
    return found
