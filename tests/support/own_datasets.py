"""Map-style Datasets as users write them, without torch: worker processes import this module in
half a second."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import own_data


class Noisy:
    """The numbers of own_data with noise, drawn again for each sample in each epoch."""

    def __init__(self, split: str) -> None:
        self.arrays = own_data.numbers(split)

    def __len__(self) -> int:
        return len(self.arrays["x"])

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        noise = 0.1 * np.random.normal(size=(3, 2)) + random.gauss(0.0, 0.1)
        return self.arrays["x"][index] + noise, self.arrays["y"][index]


def noisy(split: str) -> Noisy:
    return Noisy(split)


def noisy_in_torch(split: str) -> Any:
    import own_torch_dataset

    return own_torch_dataset.NoisyInTorch(split)


class Flawed:
    """40 samples of three classes; `flaw` says what is wrong with sample 7, or with the whole
    set."""

    classes = ("ant", "bee", "cat")

    def __init__(self, flaw: str = "") -> None:
        self.flaw = flaw
        self.random = np.random.default_rng(0)
        self.lengths = iter([40, 40, 40, 39])

    def __len__(self) -> int:
        return next(self.lengths, 39) if self.flaw == "length" else 40

    def __getitem__(self, index: int) -> Any:
        x = np.full((2, 3), index, np.float32) + np.random.rand(2, 3).astype(np.float32)
        y = index % 3
        if self.flaw == "own generator":
            x += self.random.random()
        if index != 7 or not self.flaw:
            return {"x": x, "y": y}
        if self.flaw == "error":
            raise ZeroDivisionError("no such image")
        if self.flaw == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        changed: dict[str, dict[str, Any]] = {
            "shape": {"x": x[:1], "y": y},
            "dtype": {"x": x.astype(np.float64), "y": y},
            "keys": {"x": x, "z": y},
            "nan": {"x": x * np.nan, "y": y},
            "label": {"x": x, "y": 3},
            "text": {"x": "seven", "y": y},
        }
        return changed[self.flaw]


def rows(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A collate function of equal rows."""
    return {name: np.stack([sample[name] for sample in samples]) for name in ("x", "y")}


def ragged_rows(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One that gives sample 7 another shape."""
    batch = rows(samples)
    return batch | {"x": batch["x"][:, :1]} if batch["x"][0, 0, 0] // 1 == 7 else batch


def ragged_on_rank_1(split: str) -> Any:
    """A Dataset whose collate function gives another shape on rank 1, of all samples but the first
    and the last."""

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = rows(samples)
        inner = 0 < batch["x"][0, 0, 0] // 1 < 39
        return (
            batch | {"x": batch["x"][:, :1]}
            if inner and os.environ["OMPI_COMM_WORLD_RANK"] == "1" and steps_began()
            else batch
        )

    return Flawed(), collate


def steps_began() -> bool:
    """Whether the job writes its events already: not while the ranks still compare their data."""
    return Path(os.environ["RAGGED_RUN"], "events.jsonl").exists()
