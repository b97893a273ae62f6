"""Classification in NumPy, with its gradient written by hand: the oracle of the other frameworks."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.arrays import Batch
from hvdtrain.tasks.inputs.transform import Transform
from hvdtrain.tasks.task import Each, Place


class NumpyClassification:
    """Images are uint8 (n, H, W, C), flattened as torch does, other numbers (n, ...); logits (n, classes)."""

    where = staticmethod(np.where)  # of this framework

    def __init__(self, transform: Transform, classes: int, place: Place, *, squared_error: bool, smoothing: float) -> None:
        self._transform, self._classes, self._dtype = transform, classes, place.dtype
        self._squared_error, self._smoothing = squared_error, smoothing

    def inputs(self, batch: Batch) -> np.ndarray:
        """(n, C H W) in the learner's number type; n may be 0."""
        return self._transform.flat(batch["x"], self._dtype)

    def each(self, outputs: np.ndarray, batch: Batch, training: bool) -> Each:
        smoothing = self._smoothing if training else 0.0
        loss, _ = self._of_labels(outputs, batch["y"], smoothing)
        if "mixup_weight" in batch:
            weight = batch["mixup_weight"].astype(self._dtype)
            loss = weight * loss + (1 - weight) * self._of_labels(outputs, batch["partner_y"], smoothing)[0]
        return Each(loss, {"right": outputs.argmax(1) == batch["y"]})

    def gradient(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        """(n, classes), in training."""
        error = self._of_labels(outputs, batch["y"], self._smoothing)[1]
        if "mixup_weight" in batch:
            weight = batch["mixup_weight"].astype(self._dtype)
            error = weight[:, None] * error + (1 - weight)[:, None] * self._of_labels(outputs, batch["partner_y"], self._smoothing)[1]
        return error

    def _of_labels(self, logits: np.ndarray, labels: np.ndarray, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
        """Each sample's loss (n,), and d(loss) / d(logits) (n, classes)."""
        target = np.eye(self._classes, dtype=self._dtype)[labels] * (1.0 - smoothing) + smoothing / self._classes
        if self._squared_error:
            error = logits - target
            return 0.5 * np.square(error).sum(1), error
        shifted = logits - logits.max(1, keepdims=True, initial=-np.inf)
        log_softmax = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        return -(log_softmax * target).sum(1), np.exp(log_softmax) - target
