"""What a torch model is trained to make small: one number for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Loss:
    """Logits (n, classes) and labels (n,) -> (n,)."""

    squared_error: bool
    smoothing: float  # share of the label that is spread over all classes (Szegedy et al. 2015, arXiv:1512.00567, section 7)

    def of(self, logits: torch.Tensor, batch: dict[str, Any], training: bool) -> torch.Tensor:
        """(n,), unweighted: of a mixed batch share L(y) + (1 - share) L(y2) (Zhang et al. 2017, arXiv:1710.09412)."""
        each = self.each(logits, batch["y"], training)
        if "share" not in batch:
            return each
        share = batch["share"].to(each.dtype)
        return share * each + (1.0 - share) * self.each(logits, batch["y2"], training)

    def each(self, logits: torch.Tensor, labels: torch.Tensor, training: bool) -> torch.Tensor:
        """In training with label smoothing: (1 - e) CE + e times the mean over classes of -log p; in validation without."""
        smoothing = self.smoothing if training else 0.0
        if self.squared_error:
            label = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
            label = label * (1.0 - smoothing) + smoothing / logits.shape[1]
            return 0.5 * (logits - label).square().sum(1)
        return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
