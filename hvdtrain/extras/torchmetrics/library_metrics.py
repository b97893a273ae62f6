"""torchmetrics: states that are sums are added over steps and ranks in float64; other states are
gathered."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hvdtrain.core.metrics import Better, Concatenated
from hvdtrain.core.own_line import own_line
from hvdtrain.data.field import Padding
from hvdtrain.errors import BUG, UserError, exit_code_of, first_line
from hvdtrain.tasks.user_functions import GatheredMetric, LibraryFunction, OwnMetric

Inputs = Callable[[Any, Mapping[str, Any]], tuple[Any, Any]]  # (outputs, batch) -> (preds, target)
_KNOWN = ("sum", "mean", "max", "min", "cat", "stack")  # of _reduction()
_FIX = '(metric, "max", lambda outputs, batch: (preds, target))'
_UPDATE = f"{_FIX}, with a metric whose update() takes these two; or hvdtrain.OwnMetric"


def has_sums_alone(metric: Any) -> bool:
    """Whether every state is a sum over samples."""
    return all(_reduction(reduction) == "sum" for reduction in metric._reductions.values())


def metric_of(
    name: str, metric: Any, better: Better, inputs: Inputs | None, where: str
) -> OwnMetric | GatheredMetric:
    """Returns a metric of torchmetrics as one of hvdtrain. Raises UserError if that is not
    possible."""
    if not has_sums_alone(metric):
        parts = PartsOfMetric(name, metric, inputs, where)
        return GatheredMetric(parts, better, parts.compute)
    sums = SumsOfMetric(name, metric, inputs, where)
    return OwnMetric(sums, better, sums.length, sums.compute)


def _reduction(function: Any) -> str:
    """Returns the way in which the library combines states of several ranks: sum, mean, max, min,
    cat, stack, or the function's name."""
    name = "stack" if function is None else getattr(function, "__name__", type(function).__name__)
    return str(name).removeprefix("dim_zero_")


class _Library:
    """A copy of a metric, so that the script's object does not change."""

    def __init__(self, name: str, metric: Any, inputs: Inputs | None, where: str) -> None:
        """Raises UserError for a metric without states."""
        self.name = name
        self.where = where
        self._inputs = inputs
        self.kind = type(metric).__name__
        if not metric._defaults:
            what = f"metric {name}: {self.kind} contains other metrics, whose states are unknown"
            raise UserError(what, where, "the metrics it consists of; or hvdtrain.OwnMetric")
        self._metric = copy.deepcopy(metric)
        self._lock = threading.Lock()
        tensors = [default for default in metric._defaults.values() if hasattr(default, "double")]
        if tensors:
            self._metric.set_dtype(tensors[0].double().dtype)
        self._metric._to_sync = self._metric.sync_on_compute = (
            False  # hvdtrain combines ranks itself, whether or not torch.distributed is running
        )
        self._metric.reset()

    def refuse_padding(self, padding: Padding) -> None:
        """Raises UserError if the metric would compare outputs with padding."""
        if self._inputs is None and getattr(self._metric, "ignore_index", None) != padding.value:
            what = (
                f"metric {self.name}: {self.kind} would treat the padding of y, "
                f"{padding.value:g}, as targets"
            )
            of_real = (
                f"lambda outputs, batch: (outputs[batch[{padding.mask!r}]], "
                f"batch['y'][batch[{padding.mask!r}]])"
            )
            raise UserError(
                what, self.where, f'ignore_index with that value; or (metric, "max", {of_real})'
            )

    @property
    def defaults(self) -> dict[str, Any]:
        """Returns the initial states: a tensor or an empty list for each."""
        defaults: dict[str, Any] = self._metric._defaults
        return defaults

    def states_after(self, outputs: Any, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Returns the states after an update with only these samples, and the targets. Raises
        UserError if the update fails."""
        if self._inputs is None and "y" not in batch:
            what = (
                f"metric {self.name} compares outputs with y, but the batch only has "
                f"{', '.join(batch)}"
            )
            raise UserError(what, self.where, _FIX)
        if not all(hasattr(field, "new_zeros") for field in batch.values()):
            what = f"metric {self.name} belongs to torchmetrics, which computes on torch tensors"
            raise UserError(what, self.where, "framework=torch, or a function of arrays")
        preds, target = self._compared(outputs, batch)
        with self._lock:
            metric = self._metric.to(target.device)
            metric.reset()
            with self._named(
                f"{self.kind}.update() fails for outputs {tuple(preds.shape)}", _UPDATE
            ):
                metric.update(preds, target)
            states = {state: getattr(metric, state) for state in self.defaults}
            return {
                state: [*value] if isinstance(value, list) else value.clone()
                for state, value in states.items()
            }, target

    def _compared(self, outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns (preds, target). Raises UserError if the user's function fails or returns
        anything else."""
        if self._inputs is None:
            return _same_shape(outputs, batch["y"])
        with self._named("the function of its inputs fails", _FIX):
            found = self._inputs(outputs, batch)
        if (
            not isinstance(found, (tuple, list))
            or len(found) != 2
            or not all(hasattr(each, "new_zeros") for each in found)
        ):
            shown = (
                f"{len(found)} things"
                if isinstance(found, (tuple, list))
                else f"a {type(found).__name__}"
            )
            what = (
                f"metric {self.name}: the function of its inputs returns {shown}, not two tensors"
            )
            raise UserError(what, self.where, _FIX)
        preds, target = found
        return preds, target

    @contextlib.contextmanager
    def _named(self, what: str, fix: str) -> Iterator[None]:
        """Converts exceptions inside to a UserError with the metric's name, except if memory is
        exhausted."""
        try:
            yield
        except Exception as error:
            if exit_code_of(error) != BUG:
                raise
            found = f"metric {self.name}: {what}: {type(error).__name__}: {first_line(error)}"
            raise UserError(found, f"{self.where}; {own_line(error)}", fix) from error

    def value_of(self, states: Mapping[str, Any]) -> float:
        """Computes the metric from states on the host. Raises UserError if it fails, or returns
        several numbers."""
        with self._lock:
            metric = copy.deepcopy(self._metric).cpu()
        metric.reset()
        for state, value in states.items():
            setattr(metric, state, value)
        metric._update_count = 1  # otherwise the library warns that nothing was added
        with self._named(f"{self.kind}.compute() fails", "more samples; or hvdtrain.OwnMetric"):
            found = metric.compute()
        if not hasattr(found, "numel") or found.numel() != 1:
            shown = (
                f"{found.numel()} numbers"
                if hasattr(found, "numel")
                else f"a {type(found).__name__}"
            )
            what = f"metric {self.name}: {self.kind} returns {shown}, not one"
            raise UserError(what, self.where, 'average="macro", or another class')
        return float(found) if found.numel() else math.nan


class SumsOfMetric(LibraryFunction):
    """A metric as a function (outputs, batch) -> (n, length), whose sum over all samples is the
    change of its states; compute() takes that sum.

    The first row contains the change by the whole batch.
    """

    def __init__(self, name: str, metric: Any, inputs: Inputs | None, where: str) -> None:
        """metric: has_sums_alone() must be true for it. Raises UserError if it has no states."""
        self._library = _Library(name, metric, inputs, where)
        self._defaults = {
            state: value.double().clone() for state, value in self._library.defaults.items()
        }

    def refuse_padding(self, padding: Padding) -> None:
        self._library.refuse_padding(padding)

    @property
    def length(self) -> int:
        """The number of values in all states."""
        return sum(default.numel() for default in self._defaults.values())

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        states, target = self._library.states_after(outputs, batch)
        samples = len(next(iter(batch.values())))
        rows = target.new_zeros((samples, self.length)).double()
        start = 0
        for state, default in self._defaults.items():
            gained = states[state].double() - default.to(target.device)
            rows[0, start : start + default.numel()] = gained.reshape(-1)
            start += default.numel()
        return rows

    def compute(self, total: np.ndarray) -> float:
        """Computes the metric from the sum of the rows, float64 (length,). Raises UserError if it
        returns several numbers."""
        states = {}
        start = 0
        for state, default in self._defaults.items():
            gained = default.new_tensor(total[start : start + default.numel()]).reshape(
                default.shape
            )
            states[state] = _as(default.cpu() + gained, self._library.defaults[state])
            start += default.numel()
        return self._library.value_of(states)


class PartsOfMetric(LibraryFunction):
    """A metric as a function (outputs, batch) -> Concatenated, the states after only this batch;
    compute() takes the parts of all batches.

    Lists of tensors are concatenated in the order of parts; sums, maxima and minima are taken over
    all parts. States without a reduction (Pearson's moments) are stacked, as the library does over
    ranks. A mean over ranks is only allowed for constants.
    """

    def __init__(self, name: str, metric: Any, inputs: Inputs | None, where: str) -> None:
        """Raises UserError for a metric without states, and for a state with a custom reduction."""
        self._library = _Library(name, metric, inputs, where)
        self._reductions = {
            state: _reduction(function) for state, function in metric._reductions.items()
        }
        self._last: tuple[weakref.ref[Concatenated], float] | None = (
            None  # no cache: compute() is called several times for one evaluation
        )
        own = {state: found for state, found in self._reductions.items() if found not in _KNOWN}
        if own:
            state, found = next(iter(own.items()))
            what = (
                f"metric {name}: {type(metric).__name__} combines {state} of several ranks with "
                f"{found}()"
            )
            raise UserError(
                what, where, "dist_reduce_fx=sum, max, min or cat; or hvdtrain.OwnMetric"
            )

    def refuse_padding(self, padding: Padding) -> None:
        self._library.refuse_padding(padding)

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> Concatenated:
        states, _ = self._library.states_after(outputs, batch)
        return Concatenated([tuple(self._on_host(state, value) for state, value in states.items())])

    def _on_host(self, state: str, value: Any) -> tuple[np.ndarray, ...]:
        """Copies a tensor or a list of tensors to the host. The host waits for the device."""
        tensors = value if isinstance(value, list) else [value]
        if not all(hasattr(tensor, "new_zeros") for tensor in tensors):
            library = self._library
            what = (
                f"metric {library.name}: {library.kind} keeps {state}, whose values are not tensors"
            )
            raise UserError(what, library.where, "hvdtrain.OwnMetric")
        # dtypes that NumPy does not have
        wide = (
            tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor
            for tensor in tensors
        )
        return tuple(tensor.detach().cpu().numpy() for tensor in wide)

    def compute(self, parts: Concatenated) -> float:
        """Returns the metric of all parts, or NaN without any. Raises UserError if it is several
        numbers, or if a state whose mean is taken differs between parts."""
        if not len(parts):
            return math.nan
        if self._last is None or self._last[0]() is not parts:
            self._last = weakref.ref(parts), self._library.value_of(self._together(parts))
        return self._last[1]

    def _together(self, parts: Concatenated) -> dict[str, Any]:
        defaults = self._library.defaults
        return {
            state: self._state(state, default, [part[i] for part in parts])
            for i, (state, default) in enumerate(defaults.items())
        }

    def _state(self, state: str, default: Any, found: list[tuple[np.ndarray, ...]]) -> Any:
        """Combines a state of all parts, as the library does."""
        if isinstance(default, list):
            return [_tensor(array) for arrays in found for array in arrays]
        each = np.stack([array for (array,) in found])
        reduction = self._reductions[state]
        whole = each[0]
        if reduction == "mean" and (each != whole).any():
            library = self._library
            what = (
                f"metric {library.name}: {library.kind} takes the mean of {state} over ranks, "
                "which depends on their number"
            )
            raise UserError(what, library.where, "hvdtrain.OwnMetric")
        if reduction == "sum":
            first = default.cpu().numpy().astype(np.float64)
            whole = (first + (each - first).sum(0)).astype(each.dtype)
        elif reduction in ("max", "min"):
            whole = each.max(0) if reduction == "max" else each.min(0)
        elif reduction == "stack" and len(each) > 1:
            whole = each
        return _tensor(np.asarray(whole))


def _tensor(array: np.ndarray) -> Any:
    """Returns a copy on the host."""
    import torch

    return torch.from_numpy(array.copy())


def _as(value: Any, like: Any) -> Any:
    """Converts a float64 tensor to the dtype of `like`; integers are exact up to 2**53."""
    return value if like.is_floating_point() else value.round().to(like.dtype)


def _same_shape(outputs: Any, target: Any) -> tuple[Any, Any]:
    """Returns the first of several outputs, or "out" or "logits" of a dict; reshaped from (n, 1) to
    (n,) if the targets are (n,)."""
    while isinstance(outputs, (tuple, list, Mapping)):
        if isinstance(outputs, Mapping):
            named = (outputs[name] for name in ("out", "logits") if name in outputs)
            outputs = next(named, next(iter(outputs.values())))
        else:
            outputs = outputs[0]
    if outputs.numel() == target.numel() and outputs.ndim == target.ndim + 1:
        outputs = outputs.reshape(target.shape)
    return outputs, target
