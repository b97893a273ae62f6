"""Named arrays, as in a checkpoint, and batches of samples."""

from __future__ import annotations

from typing import Any

import numpy as np

# "p." weights, "b." buffers, "s." optimizer state: {"p.fc.weight": ..., "s.fc.weight.0": ...}
Arrays = dict[str, np.ndarray]
# On the host {"x": uint8 (n, H, W, C), "y": int64 (n,)}; after Learner.to_device() arrays of the framework. Further keys, where they apply:
#   "rows"              int64 (n,), in place of "x" and "y": the samples of a data set that is cached on the device
#   "drawn"             AugmentationParameters of "x"
#   "x2", "y2"          the partners in mixup, as "x" and "y"; "rows2" in their place where the data set is cached on the device
#   "drawn2"            AugmentationParameters of "x2"
#   "share"             float64 (n,), the weight of "x" in its mixture
#   "w"                 float64 (n,), the weight of each sample's loss
Batch = dict[str, Any]
