"""A loss and metrics that are functions of a script."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from hvdtrain.config.plugins import is_torch_module
from hvdtrain.errors import UserError
from hvdtrain.tasks.task import DeviceAndDtype, Each, TaskPart, outputs_of
from hvdtrain.tasks.torch import Tensors, TorchFields, TorchInputs, TorchOfFields, as_given
from hvdtrain.tasks.user_functions import (
    UserLoss,
    UserMetrics,
    parts_of,
    terms_of,
    terms_of_no_samples,
)


class TorchFunctions:
    """A loss (outputs, batch) -> (n,)."""

    def __init__(
        self, loss: UserLoss, inputs: TorchInputs | TorchFields, place: DeviceAndDtype
    ) -> None:
        self._loss = loss
        self._inputs = inputs
        self._place = place
        self._of = (
            copy.deepcopy(loss.of).to(place.device, place.dtype)  # type: ignore[attr-defined]
            if is_torch_module(loss.of)
            else loss.of
        )

    def of_fields(self, fields: TorchFields) -> TorchFunctions:
        """Returns this part for a model that is called with several fields."""
        return TorchFunctions(self._loss, fields, self._place)

    def inputs(self, batch: Tensors) -> Any:
        named = self._inputs.named(batch)
        return named if isinstance(self._inputs, TorchFields) else named["x"]

    def batch_for_user(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """Returns all fields: inputs as the model gets them, other fields converted by their
        dtype."""
        named = self._inputs.named(batch)
        others = {
            name: as_given(field, self._place.dtype)
            for name, field in batch.items()
            if name not in named and name != "w"
        }
        return {**named, **others}

    def each(self, outputs: Any, batch: Tensors, training: bool) -> Each:
        loss = self._of(outputs, self.batch_for_user(batch))
        samples = len(next(iter(batch.values())))
        if not isinstance(loss, torch.Tensor) or tuple(loss.shape) != (samples,):
            raise UserError(*_not_of_each(loss, samples))
        terms = {}
        if self._loss.ignore is not None:
            terms["targets"] = (batch["y"] != self._loss.ignore).reshape(samples, -1).sum(1)
        return Each(loss.to(self._place.dtype), terms)


def of_fields(part: TaskPart, fields: TorchFields) -> TaskPart:
    """Returns a part for a model that is called with several fields."""
    return (
        part.of_fields(fields) if isinstance(part, TorchFunctions) else TorchOfFields(part, fields)
    )


def _not_of_each(loss: Any, samples: int) -> tuple[str, str, str]:
    """Returns the UserError for a loss that is not one number per sample."""
    where = "hvdtrain.train(), loss"
    if not isinstance(loss, torch.Tensor):
        return (
            f"loss gives a {type(loss).__name__}, not a tensor ({samples},)",
            where,
            "one number for each sample",
        )
    found = f"loss gives {tuple(loss.shape)} for {samples} samples, not ({samples},)"
    if not loss.ndim:
        fix = (
            "leave .mean() out, or give reduction='none': hvdtrain takes the mean over the "
            "samples of all ranks"
        )
        return f"loss gives one number for {samples} samples, not ({samples},)", where, fix
    fix = "the mean or sum over the other dimensions: .flatten(1).mean(1)"
    return found, where, fix if len(loss) == samples else "one number for each sample"


def check_alone(part: TaskPart, outputs: Any, batch: Tensors) -> None:
    """Raises UserError if a function's value for a sample depends on other samples of the batch:
    for example, (n, 1) minus (n,) is (n, n)."""
    if not isinstance(part, (TorchFunctions, TorchMeasured)):
        return
    samples = len(next(iter(batch.values())))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        together, again = (_totals(part.each(outputs, batch, training=False)) for _ in range(2))
        alone = [
            _totals(
                part.each(
                    rows_of(outputs, slice(i, i + 1)),
                    rows_of(batch, slice(i, i + 1)),
                    training=False,
                )
            )
            for i in range(samples)
        ]
    for name, whole in together.items():
        single = (
            torch.cat([one[name] for one in alone])
            if name == "loss"
            else torch.stack([one[name] for one in alone]).sum(0)
        )
        if torch.equal(whole, again[name]) and not torch.allclose(
            whole, single, rtol=1e-3, atol=1e-6, equal_nan=True
        ):
            what = (
                "loss"
                if name == "loss"
                else f"metric {name.removesuffix('_sum').removesuffix('_count')}"
            )
            found = (
                f"of {samples} samples together it is {_short(whole)}, of each alone "
                f"{_short(single)}"
            )
            fix = (
                "compute one value for each sample from its own outputs and fields: (n, 1) minus "
                "(n,) is (n, n), and .squeeze() drops a batch of one"
            )
            raise UserError(
                f"{what} of a sample depends on the other samples of its batch: {found}",
                f"hvdtrain.train(), {what}",
                fix,
            )


def _totals(each: Each) -> dict[str, torch.Tensor]:
    """Returns the loss of each sample, and the sums of metrics, which may belong to the whole
    batch."""
    return {
        "loss": each.loss.double(),
        **{name: term.double().sum(0) for name, term in each.terms.items()},
    }


def _short(total: torch.Tensor) -> str:
    return (
        f"{total.item():.6g}"
        if total.ndim == 0
        else ", ".join(f"{number:.6g}" for number in total.tolist()[:4])
    )


def rows_of(thing: Any, rows: slice) -> Any:
    """Selects samples from outputs or a batch: a tensor, or a tuple, list or dict of tensors."""
    if isinstance(thing, Mapping):
        return {name: rows_of(one, rows) for name, one in thing.items()}
    if isinstance(thing, (tuple, list)):
        several = (rows_of(one, rows) for one in thing)
        return type(thing)(*several) if hasattr(thing, "_fields") else tuple(several)
    return thing if thing is None else thing[rows]


class TorchMeasured:
    """A part with the terms of user-defined metrics and, in evaluations, the values gathered for
    them."""

    def __init__(self, part: TaskPart, metrics: UserMetrics, place: DeviceAndDtype) -> None:
        self._part = part
        self._metrics = metrics
        self._dtype = place.dtype
        self.inputs = part.inputs
        self.outputs_of = outputs_of(part)

    def each(self, outputs: Any, batch: Tensors, training: bool) -> Each:
        each = self._part.each(outputs, batch, training)
        if not len(each.loss):  # norm.kind=sync may give a rank a pass without samples
            return each._replace(
                terms={**each.terms, **terms_of_no_samples(self._metrics, each.loss.detach())}
            )
        with torch.no_grad():
            if isinstance(self._part, TorchFunctions):
                fields = self._part.batch_for_user(batch)
            else:
                fields = {
                    name: as_given(field, self._dtype)
                    for name, field in batch.items()
                    if name != "w"
                }
            own = terms_of(self._metrics, outputs, fields, len(each.loss), _rows)
            parts = {} if training else parts_of(self._metrics, outputs, fields)
        return each._replace(terms={**each.terms, **own}, parts={**each.parts, **parts})


def _rows(value: Any, samples: int, whole: bool) -> Any:
    """Converts to a tensor with a row for each sample. whole: one number for all samples is
    assigned to the first."""
    tensor = torch.as_tensor(value)
    if whole and tensor.ndim == 0:
        return torch.cat(
            [
                tensor.reshape(1).double(),
                torch.zeros(samples - 1, dtype=torch.float64, device=tensor.device),
            ]
        )
    return tensor
