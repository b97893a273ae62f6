"""Classification in torch: the loss of each sample: cross-entropy or squared error, with label smoothing and mixup."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from hvdtrain.tasks.inputs.torch import TorchInputs
from hvdtrain.tasks.task import Each

Tensors = Mapping[str, torch.Tensor]


class TorchClassification:
    """Images are uint8 (n, C, H, W), other numbers (n, ...); logits (n, outputs), at least one for each class."""

    where = staticmethod(torch.where)  # of this framework

    def __init__(self, inputs: TorchInputs, *, squared_error: bool, smoothing: float) -> None:
        self._inputs, self._squared_error = inputs, squared_error
        self._smoothing = smoothing  # share of the label that is spread over all classes (Szegedy et al. 2015, arXiv:1512.00567, section 7)

    def inputs(self, batch: Tensors) -> torch.Tensor:
        return self._inputs(batch["x"])

    def each(self, outputs: torch.Tensor, batch: Tensors, training: bool) -> Each:
        """With mixup weight L(label) + (1 - weight) L(partner's label) (Zhang et al. 2017, arXiv:1710.09412)."""
        loss = self._of_labels(outputs, batch["y"], training)
        if "mixup_weight" in batch:
            weight = batch["mixup_weight"].to(loss.dtype)
            loss = weight * loss + (1.0 - weight) * self._of_labels(outputs, batch["partner_y"], training)
        return Each(loss, {"right": outputs.detach().argmax(1) == batch["y"]})

    def _of_labels(self, logits: torch.Tensor, labels: torch.Tensor, training: bool) -> torch.Tensor:
        """(n,): in training with label smoothing, (1 - e) CE + e times the mean over classes of -log p; in validation without."""
        smoothing = self._smoothing if training else 0.0
        if self._squared_error:
            target = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
            target = target * (1.0 - smoothing) + smoothing / logits.shape[1]
            return 0.5 * (logits - target).square().sum(1)
        return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
