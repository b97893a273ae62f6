"""What the jobs of the day load by name: data for segmentation, and a hook that measures the host's
memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import hvdtrain
from hvdtrain.training.hooks import Training

CLASSES = 3


def masks(
    split: str, samples: int = 512, val_samples: int = 32, side: int = 256
) -> dict[str, np.ndarray]:
    """Images, and of each pixel which third of the grey values it has."""
    dice = np.random.default_rng(["train", "val"].index(split))
    count = samples if split == "train" else val_samples
    x = dice.integers(0, 256, (count, side, side, 1), np.uint8)
    return {"x": x, "y": (x[..., 0] // 86).astype(np.uint8)}


class HostMemory(hvdtrain.Hook):
    """Writes to host_memory.json in the run folder, for each checkpoint but the last: the memory of
    this process before it, and the most that it took until the next one."""

    on_rank_0_only = True

    def __init__(self) -> None:
        self._before_mb = 0.0
        self._rows: list[dict[str, float]] = []

    def before_checkpoint(self, training: Training) -> None:
        if self._before_mb:
            row = {"before_mb": self._before_mb, "most_mb": status_mb("VmHWM")}
            self._rows.append(row)
            assert training.run is not None, "a checkpoint has a run folder"
            (training.run / "host_memory.json").write_text(json.dumps(self._rows))
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        self._before_mb = status_mb("VmRSS")


def status_mb(name: str) -> float:
    """A line of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1]) * 1024 / 1e6
