"""Named arrays, as in a checkpoint, and batches of samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

# "p." weights, "b." buffers, "s." optimizer state: {"p.fc.weight": ..., "s.fc.weight.0": ...}
Arrays = dict[str, np.ndarray]


class ArrayStream(NamedTuple):
    """Arrays that come one after the other, of which the receiver keeps what it needs."""

    shapes: dict[str, tuple[int, ...]]  # of all that come
    arrays: Iterable[tuple[str, np.ndarray]]  # to be read once
    is_partial: bool = False  # what does not come stays as it is


def as_stream(state: Arrays | ArrayStream) -> ArrayStream:
    """Arrays in memory as a stream."""
    return state if isinstance(state, ArrayStream) else ArrayStream({n: a.shape for n, a in state.items()}, state.items())


# On the host {"x": uint8 (n, H, W, C), "y": int64 (n,)}; after Learner.to_device() arrays of the framework. Further keys, where they apply:
#   "augmentation"          AugmentationParameters of "x"
#   "partner_x", "partner_y", "partner_augmentation"    the same of the samples that mixup mixes in
#   "mixup_weight"          float64 (n,), the weight of "x" in its mixture
#   "w"                     float64 (n,), the weight of each sample's loss
#   "indices", "partner_indices"    int64 (n,), in place of images and labels: samples of a data set that is cached on the device
Batch = dict[str, Any]
