"""Classification in torch: normalized images, and the loss of each: cross-entropy or squared error, with label smoothing and mixup."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional

from hvdtrain.tasks.task import Each, Place

Tensors = Mapping[str, torch.Tensor]


class TorchClassification:
    """Images are uint8 (n, C, H, W), other numbers (n, ...); logits (n, outputs), at least one for each class."""

    def __init__(
        self, mean: np.ndarray, std: np.ndarray, place: Place, *, squared_error: bool, smoothing: float, images: bool = True
    ) -> None:
        by_channel = (1, -1, 1, 1) if images else (-1,)
        self._dtype, self._largest = place.dtype, 255.0 if images else 1.0
        self._mean = torch.tensor(mean, dtype=place.dtype, device=place.device).view(by_channel)
        self._std = torch.tensor(std, dtype=place.dtype, device=place.device).view(by_channel)
        self._squared_error = squared_error
        self._smoothing = smoothing  # share of the label that is spread over all classes (Szegedy et al. 2015, arXiv:1512.00567, section 7)

    def inputs(self, batch: Tensors) -> torch.Tensor:
        """x (of images / 255), less its mean, over its deviation, in the model's number type: images (n, C, H, W)."""
        return (batch["x"].to(self._dtype) / self._largest - self._mean) / self._std

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
