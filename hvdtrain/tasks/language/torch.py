"""Language in torch: the cross-entropy of each window's next tokens, in nats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.nn import functional

from hvdtrain.tasks.task import Each

Tensors = Mapping[str, torch.Tensor]
_NONE = -100  # a target that is not predicted


class CutLogits(Protocol):
    """Logits of which each tensor rank has those of a part of the vocabulary (frameworks/torch/parallel/tensor/split_logits.py)."""

    def cross_entropy(self, targets: torch.Tensor, smoothing: float, ignore: int) -> torch.Tensor:
        """Cross entropy of each target, as functional.cross_entropy() with reduction="none"; (n, T)"""


class TorchLanguage:
    """Tokens (n, T + 1); logits (n, T, outputs), at least one for each token of the vocabulary."""

    def __init__(self, ignore: int | None, smoothing: float) -> None:
        self._ignore, self._smoothing = ignore, smoothing

    def inputs(self, batch: Tensors) -> torch.Tensor:
        """int64 (n, T)"""
        return batch["tokens"][:, :-1].long()

    def each(self, outputs: torch.Tensor | CutLogits, batch: Tensors, training: bool) -> Each:
        targets = batch["tokens"][:, 1:].long()  # (n, T)
        if self._ignore is not None:
            targets = targets.masked_fill(targets == self._ignore, _NONE)
        smoothing = self._smoothing if training else 0.0
        if isinstance(outputs, torch.Tensor):
            loss = functional.cross_entropy(
                outputs.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing, ignore_index=_NONE
            )
        else:
            loss = outputs.cross_entropy(targets, smoothing, _NONE)
        return Each(loss.view(targets.shape).sum(1), {"tokens": (targets != _NONE).sum(1)})
