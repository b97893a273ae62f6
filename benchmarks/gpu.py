"""All GPU measurements in one script, at most 8 minutes on an H200: step time, share of the peak, time to accuracy.

python benchmarks/gpu.py --root DIR --json FILE [--quick]

DIR holds FashionMNIST/raw. Three measurements, as lines of JSON: step.py (textbook, by hand, hvdtrain, a row for each switch; losses are
compared before anything is timed) with the full wide_resnet at batch 512; `bench step` (phases, share of the bf16 matmul peak), plain,
compiled and as CUDA graphs; seconds to 85 % validation accuracy of the textbook's loop and of hvdtrain, each with its evaluations.
--quick: a tiny network, few steps and no `bench step`, to try the script anywhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from step import LR, MEAN, STD, Textbook, device_name

from hvdtrain.core.import_torchvision import import_torchvision

ROOT = Path(__file__).resolve().parent.parent
BENCH_STEP = {"plain": [], "compiled": ["speed.compile=default"], "graphs": ["speed.compile=reduce-overhead"]}


class Scale(NamedTuple):
    """How much is measured."""

    widths: str  # of wide_resnet
    batch: int
    rounds: int
    steps: int  # of a round
    workers: int  # of the textbook's DataLoader
    target: float  # validation accuracy
    epochs: int  # at most, to the target


QUICK = Scale("4,4,8,8", batch=20, rounds=2, steps=2, workers=0, target=0.0, epochs=1)
FULL = Scale("16,160,320,640", batch=512, rounds=5, steps=10, workers=4, target=0.85, epochs=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    began = time.perf_counter()
    rounds = ["--rounds", str(scale.rounds), "--steps", str(scale.steps)]
    step_options = ["--root", str(options.root), "--widths", scale.widths, "--batch", str(scale.batch), "--workers", str(scale.workers)]
    switches = [] if options.quick else ["--switches"]
    run("benchmarks/step.py", *step_options, *rounds, *switches, "--json", str(options.json))
    job = [
        "data.name=fashion_mnist",
        f"data.root={options.root}",
        f"model.widths=[{scale.widths}]",
        f"batch.size={scale.batch}",
        "speed.precision=auto",
    ]
    if not options.quick:
        for name, overrides in BENCH_STEP.items():
            result = run("-m", "hvdtrain", "bench", "step", *job, *overrides, *rounds, "--json", "-")
            append(options.json, {"bench step": name} | json.loads(result))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    textbook = textbook_seconds(options.root, scale, device)
    hvdtrain = hvdtrain_seconds([*job, f"optim.base_lr={LR}", f"epochs={scale.epochs}"], scale.target)
    row = {"seconds to accuracy": scale.target, "device": device_name(device), "textbook": textbook, "hvdtrain": hvdtrain}
    append(options.json, row)
    print(f"all measurements: {time.perf_counter() - began:.0f} s; {options.json}")


def run(*arguments: str) -> str:
    """The standard output of `python ARGUMENTS`; exits where it fails."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    print(done.stdout[-2000:], flush=True)
    return done.stdout


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")


def textbook_seconds(root: Path, scale: Scale, device: torch.device) -> dict[str, Any]:
    """Seconds from the first step to the end of the epoch whose evaluation reaches the target; start-up is not counted on either side."""
    widths = tuple(int(width) for width in scale.widths.split(","))
    loop = Textbook(root, widths, scale.batch, device, 4 if device.type == "cuda" else 0)
    vision = import_torchvision()
    from torchvision import transforms

    change = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    val = torch.utils.data.DataLoader(vision.datasets.FashionMNIST(str(root), train=False, transform=change), 500)
    began = time.perf_counter()
    accuracy = -1.0
    epoch = 0
    while epoch < scale.epochs and accuracy < scale.target:
        epoch += 1
        loop.block(len(loop.loader))
        loop.model.eval()
        with torch.no_grad():
            right = sum((loop.model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in val)
        accuracy = right / len(val.dataset)  # type: ignore[arg-type]
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "epochs": epoch,
        "accuracy": accuracy,
        "reached": accuracy >= scale.target,
    }


def hvdtrain_seconds(overrides: list[str], target: float) -> dict[str, Any]:
    """The same for a job of hvdtrain, by the job's own clock."""
    with tempfile.TemporaryDirectory() as folder:
        run("-m", "hvdtrain", *overrides, f"stop.target={target}", f"run={folder}/run")
        lines = [json.loads(line) for line in Path(folder, "run", "events.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "epoch"][-1]
    return {
        "seconds": last["seconds"],
        "epochs": last["epoch"],
        "accuracy": last["val_accuracy"],
        "reached": last["val_accuracy"] >= target,
    }


if __name__ == "__main__":
    main()
