"""Forward passes: from a batch on the device to the sum of its losses, in training and in
evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from hvdtrain.core.metrics import Sums, zero_sums
from hvdtrain.data.images.averaging import Averaging
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.buffers import copied_buffers
from hvdtrain.frameworks.torch.call import Called, any_of, call, each_of
from hvdtrain.frameworks.torch.inputs import DeviceBatch, Inputs
from hvdtrain.frameworks.torch.precision import Precision
from hvdtrain.frameworks.torch.private_api import BatchNorm
from hvdtrain.tasks.task import Task, TaskPart, outputs_of
from hvdtrain.tasks.torch import MAIN_OUTPUTS
from hvdtrain.tasks.torch_functions import rows_of

ONE_VALUE = "more than 1 value per channel"  # part of the error of torch's batch norm
WhenEmpty = Literal["skip", "call", "call with zeros"]


class AddsLoss(torch.nn.Module):
    """A model whose layers may add to the loss and have constraints; by default they do neither."""

    notes: Sequence[str] = ()  # lines for the header

    def added_loss(self) -> torch.Tensor | float:
        """Returns what the layers add to the mean loss of the samples in the last forward pass;
        shape ()."""
        return 0.0

    def constrain(self) -> None:
        """Applies constraints to weights, after an update."""


class TrainingModel(torch.nn.Module):
    """Computes a model's outputs in training; for an empty batch, outputs whose gradients are 0,
    without updating statistics.

    when_empty: what to do without samples. skip: the output is a scalar 0. call: the model is
    called, because the statistics of norm.kind=sync and partitioned layers are collectives. call
    with zeros: it is called with two samples of zeros, because shard.stage=3 gathers weights in a
    collective, and not every model supports empty batches.
    """

    def __init__(self, model: torch.nn.Module, when_empty: WhenEmpty) -> None:
        super().__init__()
        self.model = model
        self._when_empty = when_empty

    def forward(self, inputs: Called) -> Any:
        if len(any_of(inputs)) or self._when_empty == "call":
            return call(self.model, inputs)
        if self._when_empty == "call with zeros":
            return call_with_zeros(self.model, inputs)
        return (
            torch.stack([p.sum() for p in self.model.parameters() if p.requires_grad]).sum() * 0.0
        )


@runtime_checkable
class InParts(Protocol):
    """Outputs that are split over ranks."""

    local: torch.Tensor

    def to(self, dtype: torch.dtype) -> InParts: ...

    def whole(self) -> torch.Tensor:
        """Returns the outputs of all ranks. A collective."""


def whole_outputs(outputs: Any) -> Any:
    """Returns the outputs of all ranks. A collective if each rank has a part of them."""
    is_tensor = isinstance(outputs, torch.Tensor)
    return outputs.whole() if not is_tensor and isinstance(outputs, InParts) else outputs


def first_of(outputs: Any) -> Any:
    """Returns a model's main output: the first of a tuple, list or dict, or a dict's value for a
    name in MAIN_OUTPUTS. Anything else is returned unchanged."""
    if isinstance(outputs, dict) and outputs:
        named = (outputs[name] for name in MAIN_OUTPUTS if name in outputs)
        return first_of(next(named, next(iter(outputs.values()))))
    if isinstance(outputs, (tuple, list)) and outputs:
        return first_of(outputs[0])
    return outputs


def on_host(outputs: Any) -> np.ndarray:
    """Returns a model's first output as numbers on the host. Split logits are gathered from all
    ranks, a collective."""
    array: np.ndarray = first_of(whole_outputs(outputs)).cpu().numpy()
    return array


def call_with_zeros(model: torch.nn.Module, inputs: Called) -> Any:
    """Returns the outputs (0, ...) for inputs (0, ...); the model's buffers do not change. Masks
    mark all rows as real."""
    with copied_buffers(model):
        outputs = call(
            model, each_of(inputs, lambda x: x.new_full((2, *x.shape[1:]), x.dtype == torch.bool))
        )
    if isinstance(outputs, InParts):
        return outputs.local.sum() * 0.0
    return rows_of(outputs, slice(0))


@contextlib.contextmanager
def _with_enough_samples(count: int) -> Iterator[None]:
    """Adds a fix to the error of torch's batch norms if data.sampling=partition leaves a rank one
    sample at the end of an epoch."""
    try:
        yield
    except ValueError as error:
        if count != 1 or ONE_VALUE not in f"{error}":
            raise
        what = "a micro-batch has one sample, so batch norm cannot compute its variance"
        raise UserError(
            what,
            "a step in training",
            "a larger batch.size, data.sampling=global, or norm.kind=sync",
        ) from error


def in_type(outputs: Any, dtype: torch.dtype) -> Any:
    """Returns outputs of a model in a number type: a tensor, or several of them in a tuple, a list
    or a dict."""
    if isinstance(outputs, (torch.Tensor, InParts)):
        return outputs.to(dtype)
    if isinstance(outputs, dict):
        return {name: in_type(output, dtype) for name, output in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        several = [in_type(output, dtype) for output in outputs]
        return type(outputs)(*several) if hasattr(outputs, "_fields") else tuple(several)
    return outputs if outputs is None else outputs.to(dtype)


class Losses(NamedTuple):
    total: torch.Tensor  # () for the backward pass: the sum over samples of weight times loss
    sums: Sums  # "count" and Task.sums over the samples, unweighted, as device scalars or vectors


class Evaluated(NamedTuple):
    # the model's outputs (n, ...), in the dtype of the weights; or several in a tuple or dict
    outputs: Any
    sums: Sums


class Forward:
    """Prepares samples for the task, calls the model in its precision, and computes the losses in
    the dtype of the weights."""

    def __init__(
        self,
        training: torch.nn.Module,
        evaluation: torch.nn.Module,
        inputs: Inputs,
        precision: Precision,
        task: Task,
        part: TaskPart,
        averaging: Averaging,
        when_empty: WhenEmpty,
    ) -> None:
        self._training = training
        self._evaluation = evaluation
        self._when_empty = when_empty
        self._averaging = averaging
        self.inputs = inputs
        self.precision = precision
        self.task = task
        self._part = part
        model = getattr(evaluation, "_orig_mod", evaluation)  # of torch.compile
        self._added_loss = (
            model.added_loss if isinstance(model, AddsLoss) else AddsLoss().added_loss
        )

    def inputs_of(self, batch: DeviceBatch) -> Called:
        """Returns the inputs of the model, (n, ...)."""
        inputs: Called = self._part.inputs(self.inputs.arrays(batch))
        return inputs

    def trains_one_sample(self, model: torch.nn.Module) -> bool:
        """Whether a forward pass of the model in training mode accepts one sample. If the model has
        batch norms, tries it; its buffers stay as they are."""
        if not any(isinstance(module, BatchNorm) for module in model.modules()):
            return True
        inputs = self.inputs_of(self.inputs.zeros(1))
        try:
            autocast = self.precision.autocast(self.inputs.device)
            with (
                torch.random.fork_rng(devices=[]),
                torch.no_grad(),
                copied_buffers(model),
                autocast,
            ):
                call(model.train(), inputs)
        except ValueError as error:
            return ONE_VALUE not in f"{error}"
        return True

    def losses(self, outputs: Any, batch: DeviceBatch, *, training: bool) -> Losses:
        """Returns the losses of the model's outputs for a batch with samples. Waits for labels that
        are still being copied to the device.

        The last stage of a pipeline has not read inputs of this batch.
        """
        self.inputs.arrays(batch)
        return self._losses(in_type(outputs, self.precision.weights), batch, training)

    def train(self, batch: DeviceBatch) -> Losses:
        """Returns losses of samples that are learned from; the model is in training mode."""
        inputs = self.inputs_of(batch)
        with self.precision.autocast(self.inputs.device), _with_enough_samples(len(batch)):
            outputs = self._training(inputs)
        if isinstance(outputs, torch.Tensor) and outputs.ndim == 0:  # no samples
            return Losses(outputs, zero_sums(self.task.sums))
        return self._losses(
            in_type(outputs, self.precision.weights), batch, training=True, added=self._added_loss()
        )

    def evaluate(self, batch: DeviceBatch) -> Evaluated:
        """Evaluates samples; the model is in evaluation mode, and gradients are off.

        The outputs are the mean over the views of each sample; the model is called for one view
        after the other.
        """
        arrays = self.inputs.arrays(batch)
        added: list[torch.Tensor | float] = []  # added losses of each view

        def evaluated(arrays: Mapping[str, torch.Tensor]) -> Any:
            outputs = self._evaluated(arrays)
            added.append(self._added_loss())
            return outputs

        # images are (n, C, H, W) here
        outputs = self._averaging.mean(arrays, evaluated, torch, axes=(2, 3))
        if not batch.samples:
            return Evaluated(outputs, zero_sums(self.task.sums))
        return Evaluated(
            outputs,
            self._losses(outputs, batch, training=False, added=sum(added) / len(added)).sums,
        )

    def _evaluated(self, arrays: Mapping[str, torch.Tensor]) -> Any:
        """Returns the model's outputs; for an empty batch an input, after taking part in the
        collectives."""
        inputs = self._part.inputs(arrays)
        x = any_of(inputs)
        with self.precision.autocast(x.device):
            if len(x):
                outputs = call(self._evaluation, inputs)
            elif self._when_empty == "call with zeros":
                call_with_zeros(self._evaluation, inputs)
            elif self._when_empty == "call":
                call(self._evaluation, inputs)
        return in_type(outputs, self.precision.weights) if len(x) else x

    def predicted(self, outputs: Any) -> np.ndarray:
        """Returns the model's first output on the host, in the form that the task gives it."""
        array: np.ndarray = outputs_of(self._part)(on_host(outputs))
        return array

    def _losses(
        self, outputs: Any, batch: DeviceBatch, training: bool, added: torch.Tensor | float = 0.0
    ) -> Losses:
        """added: what the model adds to the mean loss of its samples; it is weighted by their share
        of the global batch."""
        each = self._part.each(outputs, batch.arrays, training)
        terms = {
            name: term.detach().sum(0, dtype=torch.float64) for name, term in each.terms.items()
        }
        total = (each.loss * batch.arrays["w"] if "w" in batch.arrays else each.loss).sum()
        loss = each.loss.detach().double().sum()
        if isinstance(added, torch.Tensor):
            total = total + batch.weight * added.to(total.dtype)
            loss = loss + batch.weight * added.detach().double()
        return Losses(total, {"loss": loss, **terms, **each.parts, "count": batch.samples})
