"""One forward pass: from a batch on the device to the sum of its losses, in training and in evaluation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hvdtrain.core.metrics import Sums, zero_sums
from hvdtrain.frameworks.torch.inputs import DeviceBatch, Inputs
from hvdtrain.frameworks.torch.loss import Loss
from hvdtrain.frameworks.torch.precision import Precision


class TrainingModel(torch.nn.Module):
    """A model's logits, (n, classes) for n images; of none a scalar 0 whose gradients are 0, without statistics of nothing.

    With `calls_empty` the model is called without images too: the statistics of norm.kind=sync are a collective.
    """

    def __init__(self, model: torch.nn.Module, calls_empty: bool) -> None:
        super().__init__()
        self.model, self._calls_empty = model, calls_empty

    def forward(self, x: torch.Tensor) -> Any:
        if len(x) or self._calls_empty:
            return self.model(x)
        return torch.stack([p.sum() for p in self.model.parameters() if p.requires_grad]).sum() * 0.0


class Losses(NamedTuple):
    total: torch.Tensor  # () to go backward from: the sum over samples of weight times loss
    sums: Sums  # "loss", unweighted, "right" and "count" over the samples, as device scalars


class Forward:
    """Normalises images, calls the model in its precision, and computes the losses in the weights' own number type."""

    def __init__(self, training: torch.nn.Module, evaluation: torch.nn.Module, inputs: Inputs, precision: Precision, loss: Loss) -> None:
        self._training, self._evaluation = training, evaluation
        self.inputs, self.precision, self._loss = inputs, precision, loss

    def train(self, batch: DeviceBatch) -> Losses:
        """Of samples that are learned from; the model is in training mode."""
        x = self.inputs.images(batch)  # (n, C, H, W)
        with self.precision.autocast(x.device):
            logits = self._training(x)
        if logits.ndim == 0:  # of no samples
            return Losses(logits, zero_sums())
        return self._losses(logits, batch, training=True)

    def evaluate(self, batch: DeviceBatch) -> Losses:
        """Of samples that are not learned from; the model is in evaluation mode, and gradients are off."""
        x = self.inputs.images(batch)  # (n, C, H, W)
        if not len(x):
            return Losses(x.sum(), zero_sums())
        with self.precision.autocast(x.device):
            logits = self._evaluation(x)
        return self._losses(logits, batch, training=False)

    def _losses(self, logits: torch.Tensor, batch: DeviceBatch, training: bool) -> Losses:
        each = self._loss.of(logits.to(self.precision.weights), batch, training)  # (n,)
        right = (logits.detach().argmax(1) == batch.labels).sum()
        sums = {"loss": each.detach().double().sum(), "right": right.double(), "count": len(logits)}
        return Losses((each if batch.weights is None else each * batch.weights).sum(), sums)
