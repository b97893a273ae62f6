"""Compares the losses of the first steps on a GPU with the CPU's in float64.

Each number type is compared. Without a GPU, the CPU is compared with itself.

python benchmarks/losses.py [--steps 10] [--jobs wide_resnet,...] [--json FILE]

Jobs differ in optimizer and layers. Each has the same initial weights, samples and order of samples
everywhere, and no dropout, which draws from the device's generator. Fails if a step's loss differs
from the CPU's by more than the tolerance of its number type.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from blocks import Trainer, mean_loss
from step import device_name

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.training.health.signals import Signals

COMMON = ["data.name=digits", "batch.size=64", "recipe.warmup=0", "log.every_steps=1"]
TOKENS = [
    "data.name=image_tokens",
    "data.source=digits",
    "task.name=language",
    "model.name=gpt",
    "model.width=64",
]
JOBS = {
    "wide_resnet": [
        "model.name=wide_resnet",
        "model.widths=[8,16,16,16]",
        "model.dropout=0",
        "optim.base_lr=0.005",
    ],
    "ghost norm": [
        "model.name=convnet",
        "model.widths=[8,16]",
        "norm.kind=ghost",
        "norm.ghost=16",
        "optim.name=lars",
        "optim.trust=0.1",
    ],
    "mlp": [
        "model.name=mlp",
        "model.widths=[64,64]",
        "optim.name=lamb",
        "optim.base_lr=0.03",
        "optim.clip_norm=1",
    ],
    "airbench": [
        "data.name=synthetic",
        "model.name=airbench",
        "optim.name=muon",
        "optim.base_lr=0.02",
        "augment.crop=2",
    ],
    "gpt": [
        *TOKENS,
        "model.heads=2",
        "model.layers=2",
        "optim.name=adamw",
        "optim.base_lr=1e-3",
        "optim.clip_norm=1",
    ],
}
# relative. A rounding of bf16 is 2^-9, of TensorFloat-32 2^-11, of each factor; steps multiply
# them. fp16 may skip steps
TOLERANCE = {
    "fp64": 1e-9,
    "fp32": 4e-3,
    "bf16": 2e-2,
}


def losses(job: str, device: str, precision: str, steps: int) -> list[float]:
    """Returns the loss of each step."""
    words = [*COMMON, *JOBS[job], f"speed.device={device}", f"speed.precision={precision}"]
    found = []
    with Signals(0) as signals:
        trainer = Trainer(words, SingleProcessCommunicator(), signals)
        for _ in range(steps):
            before = trainer.now.sums
            trainer.block(1)
            found.append(mean_loss(before, trainer.now.sums))
    return found


def compared(job: str, device: str, steps: int) -> dict[str, Any]:
    """The largest difference of each number type, relative to the CPU's loss of the same step in
    float64."""
    expected = losses(job, "cpu", "fp64", steps)
    assert expected[-1] < expected[0], (job, expected)
    found: dict[str, float] = {}
    for precision in TOLERANCE if device == "cuda" else ("fp64", "bf16"):
        mine = losses(job, device, precision, steps)
        found[precision] = max(abs(a / b - 1) for a, b in zip(mine, expected, strict=True))
    return {"job": job, "first": expected[0], "last": expected[-1], "largest_difference": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wrong = []
    for job in options.jobs.split(","):
        row = {
            "device": device_name(torch.device(device)),
            "torch": torch.__version__,
            "steps": options.steps,
        }
        row |= compared(job, device, options.steps)
        print(json.dumps(row), flush=True)
        if options.json:
            with options.json.open("a") as out:
                out.write(json.dumps(row) + "\n")
        differences = row["largest_difference"]
        wrong += [
            f"{job} in {name}: {value:.1e}"
            for name, value in differences.items()
            if not value <= TOLERANCE[name]
        ]
    if wrong:
        sys.exit(
            f"further from the CPU in float64 than the number type explains: {', '.join(wrong)}"
        )


if __name__ == "__main__":
    main()
