"""What a part of classification gives where some samples have no class: zeros for those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.core.arrays import Batch
from hvdtrain.tasks.task import Each


class LabelledPart:
    """Another part, and the sum "labelled": how many samples have a class, which is any label but `ignored`."""

    def __init__(self, part: Any, ignored: int | None) -> None:
        self._part, self._ignored = part, ignored
        self.inputs, self._where = part.inputs, part.where

    def each(self, outputs: Any, batch: Mapping[str, Any], training: bool) -> Each:
        has_class, with_classes = self._labels(batch)
        each = self._part.each(outputs, with_classes, training)
        return Each(self._where(has_class, each.loss, 0.0), {"right": each.terms["right"] & has_class, "labelled": has_class})

    def gradient(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        """In NumPy: d(loss of each sample) / d(outputs), (n, outputs)."""
        has_class, with_classes = self._labels(batch)
        return np.where(has_class[:, None], self._part.gradient(outputs, with_classes), np.zeros((), outputs.dtype))

    def _labels(self, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Which samples have a class, bool (n,); and the batch, in which all others are of class 0."""
        has_class = batch["y"] != self._ignored
        return has_class, {**batch, "y": self._where(has_class, batch["y"], 0)}
