"""The loss of each sample of a torch model: cross-entropy or squared error, with label smoothing and mixup."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from hvdtrain.frameworks.torch.inputs import DeviceBatch


@dataclass(frozen=True)
class Loss:
    """Logits (n, classes) and labels (n,) -> (n,)."""

    squared_error: bool
    smoothing: float  # share of the label that is spread over all classes (Szegedy et al. 2015, arXiv:1512.00567, section 7)

    def of(self, logits: torch.Tensor, batch: DeviceBatch, training: bool) -> torch.Tensor:
        """(n,), unweighted: with mixup weight L(label) + (1 - weight) L(partner's label) (Zhang et al. 2017, arXiv:1710.09412)."""
        each = self._of_labels(logits, batch.labels, training)
        if batch.mixup_weight is None or batch.partner_labels is None:
            return each
        weight = batch.mixup_weight.to(each.dtype)
        return weight * each + (1.0 - weight) * self._of_labels(logits, batch.partner_labels, training)

    def _of_labels(self, logits: torch.Tensor, labels: torch.Tensor, training: bool) -> torch.Tensor:
        """(n,): in training with label smoothing, (1 - e) CE + e times the mean over classes of -log p; in validation without."""
        smoothing = self.smoothing if training else 0.0
        if self.squared_error:
            target = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
            target = target * (1.0 - smoothing) + smoothing / logits.shape[1]
            return 0.5 * (logits - target).square().sum(1)
        return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
