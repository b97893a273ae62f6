"""Segmentation in torch: the loss of each sample, and its pixels by label and prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from hvdtrain.tasks.task import DeviceAndDtype, Each
from hvdtrain.tasks.torch import NOT_PREDICTED, Tensors, TorchInputs, main_output


class TorchSegmentation:
    """Segmentation on torch. The outputs, or their main_output(), are logits (n, classes, H, W);
    y is (n, H, W), and images are uint8 (n, C, H, W)."""

    def __init__(
        self,
        inputs: TorchInputs,
        classes: int,
        ignored: int | None,
        dice: float,
        weights: Sequence[float] | None,
        place: DeviceAndDtype,
    ) -> None:
        self._inputs = inputs
        self._classes = classes
        self._ignored = ignored
        self._dice = dice
        self._weights = (
            None
            if weights is None
            else torch.tensor(weights, dtype=torch.float64, device=place.device)
        )

    def inputs(self, batch: Tensors) -> torch.Tensor:
        return self._inputs(batch["x"])

    def each(self, outputs: torch.Tensor, batch: Tensors, training: bool) -> Each:
        outputs = main_output(outputs)
        y = batch["y"].long()
        y = y if self._ignored is None else y.masked_fill(y == self._ignored, NOT_PREDICTED)
        counts = y != NOT_PREDICTED  # (n, H, W)
        pixels = counts.flatten(1).sum(1)
        weights = None if self._weights is None else self._weights.to(outputs.dtype)
        loss = (
            functional.cross_entropy(
                outputs, y, weights, reduction="none", ignore_index=NOT_PREDICTED
            )
            .flatten(1)
            .sum(1)
        )
        if self._dice:
            loss = loss + self._dice * pixels.to(loss.dtype) * (
                1.0 - self._dice_of_each(outputs, y, counts)
            )
        return Each(loss, {"pixels": pixels, "confusion": self._confusion(outputs, y, counts)})

    def _dice_of_each(
        self, outputs: torch.Tensor, y: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Returns (n,): 2 sum(p g) / (sum(p) + sum(g)) over pixels, averaged over the classes that
        occur in a sample."""
        shares = (outputs.softmax(1) * counts[:, None]).flatten(2)  # (n, classes, H W)
        numbers = torch.arange(self._classes, device=y.device)[None, :, None, None]
        # (n, classes, H W): one_hot() would look for the largest number on a CPU
        is_there = ((y[:, None] == numbers) & counts[:, None]).flatten(2)
        area = is_there.sum(2)  # (n, classes)
        each = 2.0 * (shares * is_there).sum(2) / (shares.sum(2) + area).clamp(min=1e-30)
        # torch.where(..., 0.0) would copy the number to the device, and wait
        return each.masked_fill(area == 0, 0.0).sum(1) / (area > 0).sum(1).clamp(min=1)

    def _confusion(
        self, outputs: torch.Tensor, y: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Returns int64 (n, classes ** 2): numbers of pixels by [label, prediction]. Pixels that do
        not count have a separate cell: selecting the others, and bincount() without a length, would
        make the host wait."""
        cells = self._classes**2
        cell = (self._classes * y + outputs.detach().argmax(1)).masked_fill(~counts, cells)
        found = torch.zeros((len(y), cells + 1), dtype=torch.int64, device=y.device)
        one = torch.ones((), dtype=torch.int64, device=y.device)
        cell = cell.flatten(1)
        return found.scatter_add_(1, cell, one.expand_as(cell))[:, :cells]
