"""Named arrays, as in a checkpoint, and batches of samples."""

from __future__ import annotations

from typing import Any

import numpy as np

# "p." weights, "b." buffers, "s." optimizer state: {"p.fc.weight": ..., "s.fc.weight.0": ...}
Arrays = dict[str, np.ndarray]
# On the host {"x": uint8 (n, H, W, C), "y": int64 (n,)}; after Learner.to_device() arrays of the framework. Further keys, where they apply:
#   "augmentation"          AugmentationParameters of "x"
#   "partner_x", "partner_y", "partner_augmentation"    the same of the samples that mixup mixes in
#   "mixup_weight"          float64 (n,), the weight of "x" in its mixture
#   "w"                     float64 (n,), the weight of each sample's loss
#   "indices", "partner_indices"    int64 (n,), in place of images and labels: samples of a data set that is cached on the device
Batch = dict[str, Any]
