"""Metrics of torchmetrics whose states are sums: what an update adds to them is added up over steps and ranks, in float64."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdtrain.errors import UserError

Inputs = Callable[[Any, Mapping[str, Any]], tuple[Any, Any]]  # (outputs, batch) -> (preds, target)
_FIX = '(metric, "max", lambda outputs, batch: (preds, target))'


def is_library_metric(thing: Any) -> bool:
    """Whether it is an object of a class of torchmetrics, or of one that is made of it, without importing it."""
    return any(kind.__name__ == "Metric" and kind.__module__ == "torchmetrics.metric" for kind in type(thing).__mro__)


class SumsOfMetric:
    """A metric as a function (outputs, batch) -> (n, length), whose sum over all samples is what its states gain; compute() of that sum.

    The first row has what a whole batch adds. A metric of hvdtrain's own copy is used: the script's stays as it is.
    """

    def __init__(self, name: str, metric: Any, inputs: Inputs | None, where: str) -> None:
        """Raises UserError for a metric with a state that is no sum."""
        wrong = [state for state, reduction in metric._reductions.items() if getattr(reduction, "__name__", "") != "dim_zero_sum"]
        if wrong or not metric._defaults:
            what = f"metric {name}: {type(metric).__name__} keeps {', '.join(wrong) or 'other metrics'}, which are no sums over samples"
            fix = "thresholds=200 where it has them, which counts in bins; or hvdtrain.OwnMetric"
            raise UserError(what, where, fix)
        self._name, self._where, self._inputs = name, where, inputs
        self._metric, self._lock = copy.deepcopy(metric), threading.Lock()
        self._metric.set_dtype(next(iter(metric._defaults.values())).double().dtype)
        self._metric.sync_on_compute = False  # ranks are added up here, whatever torch.distributed has started
        self._metric.reset()
        self._defaults = {state: value.double().clone() for state, value in self._metric._defaults.items()}

    @property
    def length(self) -> int:
        """Numbers of all states."""
        return sum(default.numel() for default in self._defaults.values())

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        if self._inputs is None and "y" not in batch:
            what = f"metric {self._name} compares outputs with y; the batch has {', '.join(batch)}"
            raise UserError(what, self._where, _FIX)
        if not all(hasattr(field, "new_zeros") for field in batch.values()):
            what = f"metric {self._name} is of torchmetrics, which computes on tensors of torch"
            raise UserError(what, self._where, "framework=torch, or a function of arrays")
        preds, target = _same_shape(outputs, batch["y"]) if self._inputs is None else self._inputs(outputs, batch)
        samples = len(next(iter(batch.values())))
        rows, start = target.new_zeros((samples, self.length)).double(), 0
        with self._lock:
            gained = self._gained(preds, target)
        for state in gained:
            rows[0, start : start + state.numel()] = state.reshape(-1)
            start += state.numel()
        return rows

    def _gained(self, preds: Any, target: Any) -> list[Any]:
        """What an update adds to each state, float64. Raises UserError where it fails."""
        metric = self._metric.to(target.device)
        metric.reset()
        try:
            metric.update(preds, target)
        except (ValueError, RuntimeError) as error:
            first_line = str(error).partition("\n")[0]
            what = f"metric {self._name}: {type(metric).__name__}.update() fails for outputs {tuple(preds.shape)}: {first_line}"
            raise UserError(what, self._where, _FIX) from error
        return [getattr(metric, state).double() - default.to(target.device) for state, default in self._defaults.items()]

    def compute(self, total: np.ndarray) -> float:
        """The metric of the sum of the rows, float64 (length,). Raises UserError where it is several numbers."""
        with self._lock:
            metric, start = copy.deepcopy(self._metric).cpu(), 0
        metric.reset()
        for state, default in self._defaults.items():
            gained = default.new_tensor(total[start : start + default.numel()]).reshape(default.shape)
            value = default.cpu() + gained
            before = getattr(metric, state)
            setattr(metric, state, value if before.is_floating_point() else value.round().to(before.dtype))
            start += default.numel()
        metric._update_count = 1  # else it warns that nothing was added
        found = metric.compute()
        if not hasattr(found, "numel") or found.numel() != 1:
            shown = f"{found.numel()} numbers" if hasattr(found, "numel") else f"a {type(found).__name__}"
            what = f"metric {self._name}: {type(metric).__name__} gives {shown}, not one"
            raise UserError(what, self._where, 'average="macro", or another class')
        return float(found) if found.numel() else math.nan


def _same_shape(outputs: Any, target: Any) -> tuple[Any, Any]:
    """Outputs, of several the first, or "out" or "logits" of a dict; as (n,) where they are (n, 1) and the targets are not."""
    while isinstance(outputs, (tuple, list, Mapping)):
        if isinstance(outputs, Mapping):
            named = (outputs[name] for name in ("out", "logits") if name in outputs)
            outputs = next(named, next(iter(outputs.values())))
        else:
            outputs = outputs[0]
    if outputs.numel() == target.numel() and outputs.ndim == target.ndim + 1:
        outputs = outputs.reshape(target.shape)
    return outputs, target
