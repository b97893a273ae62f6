"""Arrays by name, as a checkpoint holds them, and batches of samples."""

from __future__ import annotations

from typing import Any

import numpy as np

# "p." weights, "b." buffers, "s." optimizer state: {"p.fc.weight": ..., "s.fc.weight.0": ...}
Arrays = dict[str, np.ndarray]
# {"x": uint8 (n, H, W, C), "y": int64 (n,)} on the host, and "w": float64 (n,) where samples are weighted; the framework's own arrays after
# Learner.to_device
Batch = dict[str, Any]
