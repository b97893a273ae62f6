"""Seconds to a validation accuracy on Fashion-MNIST: the textbook's loop of step.py, and a job of hvdtrain with the same network and rate.

python benchmarks/accuracy.py --root DIR [--widths 16,160,320,640] [--batch 512] [--target 0.85] [--epochs 8] [--json FILE]

DIR holds FashionMNIST/raw. Each evaluates after every epoch, and these seconds count; the start of neither does.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from step import LR, MEAN, STD, Textbook, device_name

from hvdtrain.core.import_torchvision import import_torchvision


def textbook_seconds(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds from the first step to the end of the epoch whose evaluation reaches the target."""
    widths = tuple(int(width) for width in options.widths.split(","))
    loop = Textbook(options.root, widths, options.batch, device, 4 if device.type == "cuda" else 0)
    vision = import_torchvision()
    from torchvision import transforms

    change = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    val = torch.utils.data.DataLoader(
        vision.datasets.FashionMNIST(str(options.root), train=False, transform=change), 500
    )
    began = time.perf_counter()
    accuracy = -1.0
    epoch = 0
    while epoch < options.epochs and accuracy < options.target:
        epoch += 1
        loop.block(len(loop.loader))
        loop.model.eval()
        with torch.no_grad():
            right = sum(
                (loop.model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in val
            )
        accuracy = right / len(val.dataset)  # type: ignore[arg-type]
    return outcome(time.perf_counter() - began, epoch, accuracy, options.target)


def hvdtrain_seconds(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the same for a job of hvdtrain, measured by the job's own clock."""
    job = [
        "data.name=fashion_mnist",
        f"data.root={options.root}",
        f"model.widths=[{options.widths}]",
        "speed.precision=auto",
    ]
    job += [
        f"batch.size={options.batch}",
        f"optim.base_lr={LR}",
        f"epochs={options.epochs}",
        f"stop.target={options.target}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "hvdtrain", *job, f"run={folder}/run"],
            stdout=sys.stderr,
            check=True,
        )
        lines = [
            json.loads(line)
            for line in Path(folder, "run", "events.jsonl").read_text().splitlines()
        ]
    last = [line for line in lines if line["kind"] == "epoch"][-1]
    return outcome(last["seconds"], last["epoch"], last["val_accuracy"], options.target)


def outcome(seconds: float, epochs: int, accuracy: float, target: float) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 2),
        "epochs": epochs,
        "accuracy": accuracy,
        "reached": accuracy >= target,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--widths", default="16,160,320,640")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    row = {
        "target": options.target,
        "device": device_name(device),
        "widths": options.widths,
        "batch": options.batch,
    }
    row |= {"textbook": textbook_seconds(options, device), "hvdtrain": hvdtrain_seconds(options)}
    print(json.dumps(row))
    if options.json:
        with options.json.open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
