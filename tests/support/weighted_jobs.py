"""Jobs that draw samples by weight, on the ranks of this start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import hvdtrain
from hvdtrain.comm.launcher_variables import placement

SAMPLES = 60
JOB = [
    "model.name=linear",
    "batch.size=13",
    "optim.name=sgd",
    "optim.base_lr=0.1",
    "speed.precision=fp64",
    "log.display=lines",
]


def data() -> dict[str, np.ndarray]:
    """Two classes, one of them rare; weights with a zero."""
    random = np.random.default_rng(3)
    weight = random.random(SAMPLES)
    weight[[0, 7, -1]] = 0.0
    return {
        "x": random.normal(size=(SAMPLES, 4)),
        "y": (np.arange(SAMPLES) % 10 == 3).astype(np.int64),
        "weight": weight,
    }


def trained(run: Path, weights: Any, *words: str) -> dict[str, np.ndarray]:
    """What a job of nine steps trains; it may be given as stop.steps=N of `words`."""
    found = hvdtrain.train(
        {"run": f"{run}", "stop.steps": 9},
        *JOB,
        *words,
        train_data=data(),
        val_data=data(),
        sample_weights=weights,
    )
    return dict(found.weights)


def on_ranks(folder: str) -> int:
    """Runs jobs with weights of a field, stopped after four steps, of classes, in several passes,
    and of an array. Rank 0 saves the weights of the jobs that end."""
    os.chdir(folder)
    trained(Path("field"), "weight", "stop.steps=4")
    jobs = {"classes": ("balanced", "batch.micro=3"), "array": (data()["weight"],)}
    for name, words in jobs.items():
        found = trained(Path(name), *words)
        if placement(os.environ).rank == 0:
            np.savez(f"{name}.npz", **found)
    return 0
